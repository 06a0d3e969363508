"""The real half of the benchmark of diagnosis: jobs on this machine that go wrong as planned.

One job has many stretches, one after the other, with ordinary steps in between. It records to a file, which the engine
then gets step by step, as a viewer would.

A fault costs what the others waited because of it: in each watched step that it struck, the last bucket's last launch
is compared with what it would have been if the rank had launched earlier by what the strike took. With more ranks than
cores, a rank may have been early by more than that: a fault that costs less than 5 % of a step is none. What DDP's own
logger shows to be exposed is exposed, and a rank that the kernel let wait for a core is late.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.diagnosis_goals import COUNTED_SIZE, Judged
from benchmarks.diagnosis_job import LAYERS, Stretch
from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.engine import Diagnosis
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.thresholds import EXPOSED_SHARE, OVER_SHARE
from ddpwatch.analysis.groups import Groups
from ddpwatch.analysis.layouts import Layouts
from ddpwatch.analysis.run import Run
from ddpwatch.recording.reader import Recording
from ddpwatch.sampling.levels import is_watched
from ddpwatch.wire.messages import Layout
from tests.support.diagnosis_cases import Truth
from tests.support.diagnosis_oracle import Figure, Floats, Powers, powers
from tests.support.diagnosis_score import SOON_STEPS, Score, judge, latest, look, unexplained

START_STEP, STRETCH_STEPS, CALM_STEPS = 60, 80, 50
SIZES = (0.10, 0.20, 0.50)
STOP_S = (1.0, 3.0)
JOB_LIMIT_S = 900
DONE = "done"  # an empty file, beside what a job that ended has left
SCRIPTS = ("plain", "trainer", "paced")
USUAL_SCRIPTS = SCRIPTS[:2]
COMPARED_STEPS = 64  # before transfers became slower
FEWEST_SEEN = 3  # watched strikes, to know what they cost
LATE = ("straggler", "intermittent", "drift", "slow_input")
_PHASES = ("data", "forward", "backward")


@dataclass
class RealRun:
    """What came of one job.

    Attributes:
        others: Warnings and errors that no fault explains.
        confirmed: Warnings that others confirm: see `is_exposed`, `is_slower`, `is_starved`.
        cheap: Which faults cost less than `COUNTED_SIZE` of a step.
        clean_steps: Steps in which nothing was to go wrong.
    """

    judged: list[Judged] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    others: list[Incident] = field(default_factory=list)
    confirmed: int = 0
    cheap: list[int] = field(default_factory=list)
    clean_steps: int = 0


# -- the plan ------------------------------------------------------------------------------------------------


def stretches(script: str, world: int, seed: int) -> Iterator[Stretch]:
    """What goes wrong in a job, in random order."""
    dice = random.Random(f"{script} {world} {seed}")
    kinds = ["constant"] * 4 + ["periodic"] * 2 + ["stall", "stop", "busy", "gc", "slow_input_all"]
    places = ["data", "forward", "backward", "backward"]
    dice.shuffle(kinds)
    since = START_STEP
    for kind in kinds:
        about = _about(kind, places, dice)
        steps = about.pop("steps", STRETCH_STEPS)
        rank = None if kind == "slow_input_all" else dice.randrange(world)
        yield Stretch(kind=kind, rank=rank, since=since, until=since + steps, layer=dice.randrange(LAYERS), **about)
        since += steps + CALM_STEPS


def _about(kind: str, places: list[str], dice: random.Random) -> dict[str, Any]:
    if kind == "constant":
        return {"place": places.pop(), "size": dice.choice(SIZES)}
    if kind == "periodic":
        period = dice.randint(2, 8)
        return {"place": dice.choice(["forward", "backward"]), "size": 0.5, "period": period, "steps": 20 * period}
    if kind in ("stall", "stop"):
        place = "stop" if kind == "stop" else "backward"
        return {"place": place, "seconds": dice.uniform(*STOP_S), "steps": 1}
    if kind == "gc":
        return {"place": "gc", "period": 10}
    return {"place": "busy"} if kind == "busy" else {"place": "data", "size": 0.5}


# -- the job -------------------------------------------------------------------------------------------------


Stop = Callable[[], bool]


class StoppedError(Exception):
    """The benchmark is to end: the job that ran was ended, and does not count."""


def run_job(
    script: str, world: int, planned: Sequence[Stretch], steps: int, folder: Path, pinned: bool, stop: Stop
) -> None:
    """Runs a job to its end, in a session of its own: Ctrl-C asks for the benchmark's end, and is no fault of the job.

    Raises:
        StoppedError: The end was asked for.
    """
    plan = {"script": script, "steps": steps, "pinned": pinned, "stretches": [asdict(one) for one in planned]}
    (folder / "plan.json").write_text(json.dumps(plan))
    job = Path(__file__).with_name("diagnosis_job.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(job)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(job.parents[1])}
    with (folder / "output.txt").open("wb") as output:
        job_process = subprocess.Popen(
            [*command, str(folder / "plan.json"), str(folder)], env=environment,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        code = _waited_for(job_process, stop)
    if code:
        sys.exit(f"the job failed\n{(folder / 'output.txt').read_text()[-2000:]}")
    file = folder / "run.mcap"
    while not Recording(file).parts[0].index.complete:
        time.sleep(0.2)


def _waited_for(job: subprocess.Popen[bytes], stop: Stop) -> int:
    """The job's exit code."""
    end = time.monotonic() + JOB_LIMIT_S
    while (code := job.poll()) is None:
        if stop() or time.monotonic() > end:
            job.terminate()
            job.wait()
            if stop():
                raise StoppedError
            sys.exit(f"the job took longer than {JOB_LIMIT_S} s")
        time.sleep(0.2)
    return code


@contextmanager
def _folder(keep: Path | None, name: str) -> Iterator[tuple[Path, bool]]:
    """Where a job records, and whether it has done so before; without a folder to keep it in, for this time only."""
    if keep is None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            yield Path(temporary), False
        return
    folder = keep / name
    if done := (folder / DONE).exists():
        yield folder, done
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder, done
    (folder / DONE).touch()


def real_run(script: str, world: int, seed: int, stop: Stop, keep: Path | None = None) -> RealRun:
    """A job with faults; one that was kept is diagnosed again."""
    planned = list(stretches(script, world, seed))
    steps = planned[-1].until + CALM_STEPS
    with _folder(keep, f"{script}-{world}-{seed}") as (folder, done):
        if not done:
            run_job(script, world, planned, steps, folder, True, stop)
        run = diagnose(folder, planned, world)
    run.clean_steps = steps - sum(one.until - one.since for one in planned)
    return run


def clean_run(script: str, world: int, steps: int, disturbed: bool, stop: Stop, keep: Path | None = None) -> RealRun:
    """A job in which nothing goes wrong, with other work on the machine or without."""
    name = f"clean-{script}-{world}-{steps}-{'disturbed' if disturbed else 'alone'}"
    with _folder(keep, name) as (folder, done):
        if not done:
            with _other_work() if disturbed else nullcontext():
                run_job(script, world, [], steps, folder, False, stop)
        run = diagnose(folder, [], world)
    run.clean_steps = steps
    return run


@contextmanager
def _other_work() -> Iterator[None]:
    """A process that takes a core for one second of three."""
    busy = "import time\nwhile True:\n    end = time.monotonic() + 1\n    while time.monotonic() < end: pass\n"
    other = subprocess.Popen([sys.executable, "-c", f"{busy}    time.sleep(2)\n"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


# -- the diagnosis -------------------------------------------------------------------------------------------


def diagnose(folder: Path, planned: Sequence[Stretch], world: int) -> RealRun:
    """Feeds a recording to the engine, step by step, and compares what it says with what was done."""
    file = folder / "run.mcap"
    abouts = [json.loads((folder / f"strikes-{rank}.json").read_text()) for rank in range(world)]
    truths = _truths(abouts, planned, world, _layouts(file))
    scores = {at: Score(truth) for at, truth in truths.items()}
    watched: list[bool] = []
    leads: dict[int, Floats] = {}
    ahead: dict[int, dict[int, int]] = {}
    usual: list[int] = []
    struck = {step for truth in truths.values() for step in truth.strikes.tolist()}
    for diagnosis, steps in diagnosed(file):
        for across in steps:
            watched.append(all(is_watched(step.status) for step in across.ranks.values()))
            if across.step not in struck:
                usual.append(across.longest_ns)
            if watched[-1] and across.counted and len(across.ranks) == world and across.skew.buckets:
                leads[across.step] = _leads(across)
                ahead[across.step] = _ahead(across)
            look(diagnosis, scores.values(), across.step, watched, world)
    run = RealRun(incidents=diagnosis.incidents())
    calm = np.array([lead for step, lead in leads.items() if step not in struck])
    for at, score in scores.items():
        took = _took(abouts, at)
        score.oracle = _oracle(planned[at], score.truth, took, leads, calm)
        score.latest = latest(score.truth, np.array(watched))
        if (ns := _waited_ns(score.truth, took, ahead, struck)) is not None:
            if score.truth.cost_ns:
                score.truth.cost_ns = int(ns * (world - 1) * len(score.truth.strikes))
            if ns < COUNTED_SIZE * median(usual):
                run.cheap.append(at)
    judge(scores.values(), run.incidents, world)
    run.judged = [
        Judged(planned[at].kind, planned[at].size, "real", score) for at, score in scores.items() if at not in run.cheap
    ]
    others = unexplained(truths.values(), run.incidents, world)
    witnesses = (is_exposed, is_slower, is_starved)
    run.others = [one for one in others if not any(confirms(abouts, one) for confirms in witnesses)]
    run.confirmed = len(others) - len(run.others)
    return run


def _waited_ns(
    truth: Truth, took: Mapping[int, int], ahead: Mapping[int, Mapping[int, int]], struck: Collection[int]
) -> float | None:
    """What each other rank waited because of one, in a mean step that it struck; None without enough watched ones.

    Args:
        truth: Whose it was.
        took: How long the rank was held up, by step (ns); 0 where something else on its core did that.
        ahead: How much later each rank launched than the last other one, by watched step (ns).
        struck: The steps of all truths.
    """
    if len(truth.ranks) != 1:
        return None
    leads = {step: by_rank[truth.ranks[0]] for step, by_rank in ahead.items()}
    seen = [(took[step], max(0, leads[step])) for step in took if step in leads]
    calm = [max(0, lead) for step, lead in leads.items() if step not in struck]
    if len(seen) < FEWEST_SEEN or not calm:
        return None
    return fmean(min(ns, lead) if ns else lead - fmean(calm) for ns, lead in seen)


def is_exposed(abouts: Sequence[Mapping[str, Any]], incident: Incident) -> bool:
    """Whether DDP's logger says that it is: what the rank that waits least waits is no waiting for another."""
    if incident.kind != "exposed_comm":
        return False
    duration = sum(fmean(ns for _, ns, _, _ in of_ranks) for of_ranks in _steps_of(abouts, incident))
    return sum(_exposed(abouts, incident)) >= OVER_SHARE * EXPOSED_SHARE * duration > 0


def is_slower(abouts: Sequence[Mapping[str, Any]], incident: Incident) -> bool:
    """Whether DDP's logger says that transfers take longer than before: by at least half of what that is to cost."""
    if incident.kind != "slow_link":
        return False
    before = replace(incident, since_step=(incident.since_step or 0) - COMPARED_STEPS, until_step=incident.since_step)
    exposed = _exposed(abouts, incident)
    longer = fmean(exposed) - fmean(_exposed(abouts, before)[:-1])
    return 2 * longer * len(exposed) * len(abouts) >= incident.cost_ns


def is_starved(abouts: Sequence[Mapping[str, Any]], incident: Incident) -> bool:
    """Whether the kernel says why the rank is late: it waited longer for a core than the others did.

    By at least half of what each of them is said to have waited because of it.
    """
    if incident.kind not in LATE or len(incident.ranks) != 1:
        return False
    longer = 0.0
    for of_ranks in _steps_of(abouts, incident):
        starved = [ns for _, _, ns, _ in of_ranks]
        own = starved.pop(incident.ranks[0])
        longer += own - fmean(starved)
    return 2 * longer * (len(abouts) - 1) >= incident.cost_ns


def _exposed(abouts: Sequence[Mapping[str, Any]], incident: Incident) -> list[int]:
    """What is exposed in each of its steps (ns), as DDP's logger says: what the rank that waits least waits."""
    return [min(ns for _, _, _, ns in of_ranks) for of_ranks in _steps_of(abouts, incident)]


def _steps_of(abouts: Sequence[Mapping[str, Any]], incident: Incident) -> list[tuple[tuple[int, int, int, int], ...]]:
    """What ranks noted of each step from an incident's first to its last."""
    first, last = incident.since_step or 0, incident.until_step or 0
    rows = zip(*(about["steps"] for about in abouts), strict=True)
    return [of_ranks for of_ranks in rows if first <= of_ranks[0][0] <= last]


def diagnosed(file: Path) -> Iterator[tuple[Diagnosis, list[StepAcrossRanks]]]:
    """The diagnosis after every frame of a recording, and the steps that it completed."""
    run = Run()
    for message, envelope in Recording(file):
        steps = run.apply_message(message, envelope.received_ns)
        yield run.diagnosis, steps


def _leads(across: StepAcrossRanks) -> Floats:
    """By how much each rank exceeds the mean of the others (ns): when it launches last, and in each of `_PHASES`."""
    facts = across.all_facts()
    values = np.array(
        [
            [facts[rank].launch[-1], *(facts[rank].figures.phases_ns.get(phase, 0) for phase in _PHASES)]
            for rank in sorted(facts)
        ],
        np.float64,
    )
    return np.asarray((values - values.mean(axis=0)).T * len(values) / (len(values) - 1))


def _ahead(across: StepAcrossRanks) -> dict[int, int]:
    """How much later each rank launched the last bucket than the last one of the others (ns)."""
    launches = {rank: facts.launch[-1] for rank, facts in across.all_facts().items()}
    return {rank: at - max(ns for other, ns in launches.items() if other != rank) for rank, at in launches.items()}


def _oracle(
    one: Stretch, truth: Truth, took: Mapping[int, int], leads: Mapping[int, Floats], calm: Floats
) -> Powers | None:
    """What any test could find, given what the rank did to itself and the noise of the job's other steps.

    None where a mark or a pause says it, where it is no single rank's, or without a calm step.
    """
    if one.kind not in ("constant", "periodic") or one.place not in _PHASES or not len(calm):
        return None
    steps = np.array([step for step in leads if truth.since - CALM_STEPS <= step < one.until])
    shift = np.array([took.get(step, 0) for step in steps.tolist()], np.float64)
    figures = [Figure(shift, calm[:, at], truth.ranks[0], steps) for at in (0, 1 + _PHASES.index(one.place))]
    return powers(figures, truth.since, one.kind == "periodic", SOON_STEPS)


def _took(abouts: Sequence[Mapping[str, Any]], at: int) -> dict[int, int]:
    """How long the strikes of a stretch took, by step (ns)."""
    return {step: took_ns for about in abouts for stretch, step, took_ns in about["strikes"] if stretch == at}


def _layouts(file: Path) -> Layouts:
    """All layouts of a recording."""
    layouts = Layouts(Groups())
    for message, _ in Recording(file):
        if isinstance(message, Layout):
            layouts.apply_layout(message)
    return layouts


def _truths(
    abouts: Sequence[Mapping[str, Any]], planned: Sequence[Stretch], world: int, layouts: Layouts
) -> dict[int, Truth]:
    """What was done, by stretch: in which steps, and for how long."""
    strikes: dict[int, list[tuple[int, int]]] = {}
    layers: dict[int, str] = {}
    for about in abouts:
        layers |= {int(layer): name for layer, name in about["layers"].items()}
        for at, step, took_ns in about["strikes"]:
            strikes.setdefault(at, []).append((step, took_ns))
    return {at: _truth(planned[at], found, world, layers, layouts) for at, found in sorted(strikes.items())}


_KINDS: dict[str, tuple[str, ...]] = {
    "constant": ("straggler", "slow_input"),
    "periodic": ("intermittent",),
    "stall": ("pause", "hang"),
    "stop": ("pause", "hang"),
    "busy": ("straggler", "intermittent"),
    "gc": ("intermittent", "pause"),
    "slow_input_all": ("slow_input",),
}


def _truth(
    one: Stretch, strikes: Sequence[tuple[int, int]], world: int, layers: dict[int, str], layouts: Layouts
) -> Truth:
    phase = {"stop": ("forward",), "busy": ()}.get(one.place, (one.place,))
    struck = np.unique([step for step, _ in strikes])
    hooked = one.place == "backward" and one.kind != "stall"
    waiting = 1 if one.rank is None else world - 1
    return Truth(
        _KINDS[one.kind], struck, () if one.rank is None else (one.rank,), phase,
        params=_params(layers[one.layer], layouts) if hooked else None,
        period=one.period if one.kind == "periodic" else None, slack=max(16, 4 * one.period),
        cost_ns=waiting * sum(took_ns for _, took_ns in strikes),
    )  # fmt: skip


def _params(layer: str, layouts: Layouts) -> frozenset[int]:
    """The ids of a layer's parameters."""
    names = {param: layouts.layer(param) for layout in layouts.values() for param in range(len(layout.params))}
    return frozenset(param for param, name in names.items() if f".{name}".rpartition(".")[0].endswith(f".{layer}"))
