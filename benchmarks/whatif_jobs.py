"""The jobs of `benchmarks/whatif.py`: their settings, their recordings, and the sweeps of their links."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from ddpwatch.errors import DdpwatchError
from ddpwatch.whatif.command import read_wire, recorded_in
from ddpwatch.whatif.recorded import Recorded
from ddpwatch.whatif.wire import Wire
from demo.shaped_network import JOB_TIMEOUT_S, failure, job_started, run_job, shaped_network
from tests.support.rounds import Rounds

ROOT = Path(__file__).resolve().parents[1]
LINKS_MBIT = (200.0, 1000.0, 4000.0)
CAPS_MIB = (1.0, 2.0, 5.0, 10.0, 25.0, 60.0)
MODELS = ("gpt:width=384,layers=4", "mlp:width=1536,layers=6")
RANKS = (2, 3)
CAPS_BY_RANKS = {2: CAPS_MIB, 3: (1.0, 5.0, 25.0)}  # more ranks take longer
HOOKS = ("fp16", "powersgd")
HOOK_CAP_MIB = 5.0
STRAGGLER_MS = 40
POLL_S = 0.2
QUICK = {"links": (1000.0,), "models": 1, "ranks": (2,), "caps": (1.0, 5.0, 25.0)}
OPTIONS_LINKS_MBIT = (200.0, 500.0)
# Pauses for compute: then ranks do not compete for cores, nor with what else runs
PACED_MODELS = ("paced:width=512,layers=10,ms=8", "wide:width=1024,layers=4,ms=16")
OPTIONS_MODEL = "paced"
OPTIONS_RANKS = (3, 4)
OPTIONS_CAP_MIB, OPTIONS_FIRST_MIB = 3.0, 0.5


@dataclass(frozen=True)
class Setting:
    """One training. ``hook`` is empty without a comm hook, ``first_mib`` 0 where the first bucket has the same cap."""

    model: str
    ranks: int
    mbit: float
    cap_mib: float
    hook: str = ""
    straggler: bool = False
    round: int = 0
    first_mib: float = 0.0
    bucket_view: bool = False
    find_unused: bool = False
    static_graph: bool = False
    accumulate: int = 1

    @property
    def name(self) -> str:
        """For its files."""
        parts = [self.model.partition(":")[0], str(self.ranks), f"{self.mbit:g}", f"{self.cap_mib:g}", self.hook]
        parts += ["late"] if self.straggler else []
        parts += [f"first{self.first_mib:g}"] if self.first_mib else []
        parts += [name for name in ("bucket_view", "find_unused", "static_graph") if getattr(self, name)]
        parts += [f"of{self.accumulate}"] if self.accumulate > 1 else []
        return "-".join([*filter(None, parts), str(self.round)])

    @property
    def wire(self) -> str:
        """The name of the sweep of its link."""
        return f"wire-{self.ranks}-{self.mbit:g}.json"

    @property
    def network(self) -> tuple[int, float]:
        """Its ranks and their link."""
        return self.ranks, self.mbit

    def entry(self, folder: Path, steps: int) -> dict[str, Any]:
        """Its entry in the plan of `whatif_train.py`."""
        return {
            "arguments": self._arguments(folder / f"{self.name}.mcap", steps),
            "options": self._ddp_options(),
            "setting": asdict(self),
            "described": str(folder / f"{self.name}.json"),
        }

    def _arguments(self, file: Path, steps: int) -> list[str]:
        options = ["--model", self.model, "--batch-size", "4", "--bucket-cap-mb", f"{self.cap_mib:g}"]
        paced = is_paced(self.model)
        options += ["--data", "digits"] if paced or self.model.startswith("mlp") else []
        options += ["--optimizer", "sgd"] if paced else []
        options += ["--comm-hook", self.hook] if self.hook else []
        options += ["--powersgd-rank", "2", "--powersgd-start", "2"] if self.hook == "powersgd" else []
        options += ["--inject", f"slow-backward:rank=1,ms={STRAGGLER_MS}"] if self.straggler else []
        options += ["--find-unused-parameters"] if self.find_unused else []
        options += ["--accumulate", str(self.accumulate)]
        return [*options, "--steps", str(steps), "--record", str(file)]

    def _ddp_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"bucket_cap_mb_list": [self.first_mib, self.cap_mib]} if self.first_mib else {}
        options |= {"gradient_as_bucket_view": True} if self.bucket_view else {}
        return options | ({"static_graph": True} if self.static_graph else {})


def pair_settings(rounds: int, quick: bool, models: Sequence[str] = MODELS) -> Iterator[Setting]:
    """Caps, hooks, stragglers; a network after the other."""
    chosen: dict[str, Any] = QUICK if quick else {}
    for ranks in chosen.get("ranks", RANKS):
        for mbit in chosen.get("links", LINKS_MBIT):
            settings = []
            for model in models[: chosen.get("models")]:
                settings += [Setting(model, ranks, mbit, cap) for cap in chosen.get("caps", CAPS_BY_RANKS[ranks])]
                at = Setting(model, ranks, mbit, HOOK_CAP_MIB)
                settings += [*(replace(at, hook=hook) for hook in HOOKS), replace(at, straggler=True)]
            yield from in_turns(settings, rounds)


def option_settings(rounds: int, quick: bool) -> Iterator[Setting]:
    """DDP's options, accumulation, bf16 and the number of ranks, each against the job without."""
    for mbit in OPTIONS_LINKS_MBIT[:1] if quick else OPTIONS_LINKS_MBIT:
        plain = Setting(OPTIONS_MODEL, 2, mbit, OPTIONS_CAP_MIB)
        unused = replace(plain, find_unused=True)
        settings = [
            plain,
            replace(plain, first_mib=OPTIONS_FIRST_MIB),
            replace(plain, bucket_view=True),
            replace(plain, hook="bf16"),
            *(replace(plain, accumulate=batches) for batches in (2, 4)),
            *(unused, replace(unused, static_graph=True)),
            *(replace(plain, ranks=ranks) for ranks in OPTIONS_RANKS),
        ]
        yield from in_turns(settings, rounds)


def in_turns(settings: Sequence[Setting], rounds: int) -> Iterator[Setting]:
    """All settings, so many times, each time in another order: a drift of the machine then slows none of them alone."""
    for number in range(rounds):
        yield from (replace(one, round=number) for one in random.Random(number).sample(settings, len(settings)))


def record(
    wanted: Sequence[Setting], folder: Path, steps: int, rounds: Rounds, sweeps: bool = True
) -> Iterator[Setting]:
    """Trains with the settings that have no recording in the folder yet, in one job per network, after its sweep."""
    ordered = sorted(wanted, key=attrgetter("network"))
    with closing(_recorded(ordered, folder, steps, sweeps)) as recorded:
        yield from rounds.over(recorded, "settings", total=len(ordered))


def _recorded(wanted: Sequence[Setting], folder: Path, steps: int, sweeps: bool) -> Generator[Setting, None, None]:
    environment = {"DDPWATCH_DETAIL": "full", "PYTHONPATH": str(ROOT)}
    for (ranks, mbit), settings in groupby(wanted, key=attrgetter("network")):
        left = []
        for setting in settings:
            if (folder / f"{setting.name}.json").exists():
                yield setting
            else:
                (folder / f"{setting.name}.mcap").unlink(missing_ok=True)
                left.append(setting)
        if not left:
            continue
        with shaped_network(ranks, mbit):
            if sweeps and not (sweep := folder / left[0].wire).exists():
                command = ["-m", "ddpwatch.whatif.sweep", "-o", str(sweep), "--max-size", "64"]
                run_job(command, ranks, folder / "sweep.log", environment)
            plan, log = folder / "plan", folder / f"{ranks}-{mbit:g}.log"
            plan.write_text(json.dumps([setting.entry(folder, steps) for setting in left]))
            command = [str(ROOT / "benchmarks" / "whatif_train.py"), str(plan)]
            with job_started(command, ranks, log, environment) as job:
                for setting in left:
                    _wait_for(folder / f"{setting.name}.json", job, log)
                    yield setting


def _wait_for(described: Path, job: Sequence[subprocess.Popen[bytes]], log: Path) -> None:
    """Waits for a training of a job.

    Raises:
        RuntimeError: The job has ended without it, or it takes too long.
    """
    end = time.monotonic() + JOB_TIMEOUT_S
    while not described.exists():
        codes = [rank.poll() for rank in job]
        if (any(code is not None for code in codes) and not described.exists()) or time.monotonic() > end:
            raise failure(codes, log)
        time.sleep(POLL_S)


def read_runs(folder: Path) -> Iterator[tuple[Setting, Recorded]]:
    """The recordings with what they show; prints which show nothing."""
    for described in sorted(folder.glob("*.json")):
        if described.name.startswith("wire-") or described.name == "scored.json":
            continue
        setting = Setting(**json.loads(described.read_text()))
        try:
            yield setting, recorded_in(described.with_suffix(".mcap"))[0]
        except DdpwatchError as error:
            print(f"{setting.name}: {error}", file=sys.stderr)


def read_wires(folder: Path, paced: bool) -> dict[str, Wire]:
    """The sweeps, by name; for jobs whose compute is pauses, without what says how cores are shared, as on GPUs."""
    wires = {file.name: read_wire(file) for file in folder.glob("wire-*.json")}
    for wire in wires.values() if paced else ():
        wire.compute_beside = None
        for size in wire.sizes:
            size.beside_ms = None
    return wires


def is_paced(model: str) -> bool:
    """Whether its compute is pauses."""
    return model.startswith(("paced", "wide"))
