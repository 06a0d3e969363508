"""The noise of made-up ranks: by how much each phase of each step deviates from what is usual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

NoiseKind = Literal["none", "quiet", "busy", "gauss", "uniform", "heavy", "slow"]
NOISES: tuple[NoiseKind, ...] = get_args(NoiseKind)[1:]
PHASES = ("data", "forward", "backward", "optimizer")
FORWARD_SHARE = 1 / 3  # of what deviates in the compute
UNIFORM_NS = 20_000_000
COMPLETION_NS = 50_000  # ranks learn at most so much after each other that a transfer is over
BLIPS, BLIP_SHARES = 0.05, (0.1, 0.3)  # of steps have one rank that takes so much longer, as a share of a step
KEPT = 0.9  # of slow noise, from step to step

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Deviations(NamedTuple):
    """Per phase, for every step and rank (ns); ``completion``: how late a rank learns that its buckets are there.

    Attributes:
        any: Whether there is noise.
    """

    phases: dict[str, Ints]
    any: bool


@dataclass(frozen=True)
class Noise:
    """A kind of noise.

    ``quiet`` and ``busy`` have the distributions of real runs (`QUIET`, `BUSY`); ``gauss`` a standard deviation of
    ``size`` (a share of the step), ``uniform`` 0 to 20 ms, ``heavy`` one rank in 20 steps with a blip of 10 to 30 %, on
    top of 1 %; ``slow`` keeps 0.9 of its deviation from step to step.
    """

    kind: NoiseKind
    size: float = 0.02

    def draw(self, rng: np.random.Generator, size: tuple[int, int], step_ns: int) -> Deviations:
        """The noise of all steps and ranks."""
        share = _DRAWN[self.kind](rng, size, step_ns, self.size)
        phases = {phase: (share.get(phase, np.zeros((1, 1))) * step_ns).astype(np.int64) for phase in PHASES}
        noisy = self.kind != "none"
        phases["completion"] = rng.integers(0, COMPLETION_NS if noisy else 1, size)
        return Deviations({phase: np.broadcast_to(values, size) for phase, values in phases.items()}, noisy)


NO_NOISE = Noise("none")
_Shares = dict[str, Floats]


def _none(rng: np.random.Generator, size: tuple[int, int], step_ns: int, sigma: float) -> _Shares:
    return {}


def _quiet(rng: np.random.Generator, size: tuple[int, int], step_ns: int, sigma: float) -> _Shares:
    return {phase: np.interp(rng.random(size), LEVELS, row) for phase, row in QUIET.items()}


def _busy(rng: np.random.Generator, size: tuple[int, int], step_ns: int, sigma: float) -> _Shares:
    return {phase: np.interp(rng.random(size), LEVELS, row) for phase, row in BUSY.items()}


def _gauss(rng: np.random.Generator, size: tuple[int, int], step_ns: int, sigma: float) -> _Shares:
    shares = {"forward": FORWARD_SHARE, "backward": 1 - FORWARD_SHARE}
    return {phase: sigma * share**0.5 * rng.standard_normal(size) for phase, share in shares.items()}


def _uniform(rng: np.random.Generator, size: tuple[int, int], step_ns: int, sigma: float) -> _Shares:
    return _somewhere(rng, rng.random(size) * UNIFORM_NS / step_ns)


def _heavy(rng: np.random.Generator, size: tuple[int, int], step_ns: int, sigma: float) -> _Shares:
    steps, world = size
    blips, ranks = np.zeros(size), rng.integers(0, world, steps)
    blips[np.arange(steps), ranks] = rng.uniform(*BLIP_SHARES, steps) * (rng.random(steps) < BLIPS)
    usual, extra = _gauss(rng, size, step_ns, 0.01), _somewhere(rng, blips)
    return {phase: usual[phase] + extra[phase] for phase in usual}


def _slow(rng: np.random.Generator, size: tuple[int, int], step_ns: int, sigma: float) -> _Shares:
    level = sigma * rng.standard_normal(size)
    for step in range(1, size[0]):
        level[step] = KEPT * level[step - 1] + (1 - KEPT**2) ** 0.5 * level[step]
    return {"forward": FORWARD_SHARE * level, "backward": (1 - FORWARD_SHARE) * level}


def _somewhere(rng: np.random.Generator, share: Floats) -> _Shares:
    """Each deviation as a whole in the forward or in the backward."""
    forward = rng.random(share.shape) < FORWARD_SHARE
    return {"forward": np.where(forward, share, 0.0), "backward": np.where(forward, 0.0, share)}


_DRAWN = {
    "none": _none, "quiet": _quiet, "busy": _busy, "gauss": _gauss, "uniform": _uniform, "heavy": _heavy, "slow": _slow,
}  # fmt: skip

LEVELS = (0.0, 0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999, 1.0)
Quantiles = dict[str, tuple[float, ...]]
# Of two Gloo ranks with one thread each, on a virtual machine with two cores: by how much a phase deviates from the
# median of 51 steps of its rank, as a share of the step. What both ranks have in common, up to 40 % of the variance, is
# taken out by a factor. A DDP benchmark, alone on the machine: 368 steps of 166 ms.
QUIET: Quantiles = {
    "data": (-0.0015, -0.0013, -0.0012, -0.0009, -0.0003, 0.0, 0.0002, 0.0007, 0.0084, 0.0336, 0.0700),
    "forward": (-0.057, -0.057, -0.053, -0.042, -0.018, 0.0, 0.019, 0.084, 0.140, 0.151, 0.155),
    "backward": (-0.214, -0.211, -0.171, -0.138, -0.062, 0.0, 0.082, 0.202, 0.389, 0.468, 0.480),
    "optimizer": (-0.0165, -0.0127, -0.0056, -0.0046, -0.0021, 0.0, 0.0023, 0.0056, 0.0085, 0.0205, 0.0231),
}
# demo/train.py (GPT) with up to a dozen other processes that compete for the cores: 663 steps of 227 ms.
BUSY: Quantiles = {
    "data": (-0.0015, -0.0013, -0.0012, -0.0009, -0.0003, 0.0, 0.0002, 0.0007, 0.0084, 0.0336, 0.0700),
    "forward": (-0.168, -0.155, -0.130, -0.087, -0.032, 0.0, 0.036, 0.102, 0.218, 0.711, 1.023),
    "backward": (-0.600, -0.374, -0.175, -0.104, -0.043, 0.0, 0.051, 0.168, 0.345, 0.904, 1.438),
    "optimizer": (-0.1213, -0.1192, -0.1011, -0.0657, -0.0266, 0.0, 0.0361, 0.0928, 0.1408, 0.2387, 0.8328),
}
