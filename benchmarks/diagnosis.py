"""Measures how often the diagnosis finds a fault, names its rank, cause, layer and period, and how often it is wrong.

    python benchmarks/diagnosis.py                          made-up jobs of 2 to 1,024 ranks
    python benchmarks/diagnosis.py --quick                  a sample of these, in three minutes
    python benchmarks/diagnosis.py --real                   jobs on this machine, with 2 to 4 Gloo ranks
    python benchmarks/diagnosis.py --real --scripts paced   the same with compute as pauses: ranks need no core each

With ``--resume FILE``, what is measured is kept there, case by case: the same command goes on where it was stopped.

A made-up job (`fleet.py`) has a known schedule, and noise of a random kind: as measured on real jobs (quiet, busy),
Gaussian, 0 to 20 ms, with outliers, or slowly changing. A fault costs what its job waits longer than the same job
without the fault.

The columns:
    detected       an incident of that kind, at that time
    search         how many a test would find that knows the phase, the size and the noise, but not the rank and the
                   steps: it compares how likely what was watched is with a mixture of them all, and without a fault
    oracle         the same of a test that knows these as well
    rank, cause    of those: the right rank; the right phase
    layer          of faults in the backward: the incident's parameter is one of the layer
    period         within one step
    word           the incident's kind is the best word for it, not only an accepted one
    pieces         incidents per fault
    named after    watched steps until the engine lists it: median and 99th percentile
    cost           stated against true: median, and 90th percentile of the absolute error
False alarms are warnings and errors in clean runs. In real jobs, those do not count that another witness confirms:
DDP's own logger, where communication is exposed, or takes longer than before; the kernel, where a rank is late because
it waited for a core.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.diagnosis_goals import (
    REAL,
    SIMULATED,
    Goals,
    Judged,
    Row,
    alarm_row,
    by_kind,
    goal_rows,
    goals_table,
)
from benchmarks.diagnosis_real import (
    SCRIPTS,
    USUAL_SCRIPTS,
    RealRun,
    StoppedError,
    clean_run,
    real_run,
)
from ddpwatch.common.text import table
from tests.support.diagnosis_cases import CLEAN_STEPS as RUN_STEPS
from tests.support.diagnosis_cases import KINDS, Case, Kind, cases, job_of
from tests.support.diagnosis_score import Result, Score, play
from tests.support.fleet_noise import NOISES
from tests.support.rounds import Rounds, rounds_done

WORLDS = (2, 4, 8, 16, 64, 1024)
REAL_WORLDS, USUAL_REAL_WORLDS = (2, 3, 4), (2,)
SEEDS, QUICK_SEEDS = 16, 1
CLEAN_STEPS, QUICK_CLEAN_STEPS, REAL_CLEAN_STEPS = 100_000, 10_000, 2_000
CLEAN_WORLDS = (2, 4, 8, 16, 2, 4, 8, 64)  # one run each, over and over
CORE_SHARE, STEPS_PER_S, MOST_RANKS = 0.15, 5, 1024


@dataclass
class Found:
    """All that was measured.

    Attributes:
        misses: What to look at: faults that were missed or misnamed, and false alarms.
        others: Unexplained incidents in runs with a fault, by kind of fault and of incident.
        confirmed, cheap: How many, see `RealRun`.
    """

    judged: list[Judged] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)
    others: Counter[tuple[str, str]] = field(default_factory=Counter)
    clean_steps: int = 0
    alarms: Counter[str] = field(default_factory=Counter)
    confirmed: int = 0
    cheap: int = 0
    speeds: list[tuple[int, float, float]] = field(default_factory=list)

    def add_real(self, run: RealRun, what: str) -> None:
        """Takes a real job: all of its steps in which nothing was to go wrong are clean."""
        self.judged += run.judged
        self.clean_steps += run.clean_steps
        self.confirmed, self.cheap = self.confirmed + run.confirmed, self.cheap + len(run.cheap)
        self.alarms.update(one.kind for one in run.others)
        said = "; ".join(map(_incident, run.incidents))
        self.misses += [f"false alarm: {what}: {_incident(one)}" for one in run.others]
        self.misses += [
            f"{what}: {one.kind} {one.size}: {_expected(one.score)}; said: {said}"
            for one in run.judged
            if _wrong(one.score)
        ]

    def add(self, result: Result) -> None:
        """Takes one case."""
        case = result.job.case
        self.speeds.append((case.world, result.engine_ns / result.rank_steps, result.facts_ns / result.rank_steps))
        if case.kind == "clean":
            self.clean_steps += result.job.shape.steps
            self.alarms.update(one.kind for one in result.others)
            self.misses += [f"false alarm: {_about(result)}: {_incident(one)}" for one in result.others]
            return
        self.judged += [Judged(case.kind, case.size, result.job.shape.noise.kind, score) for score in result.scores]
        self.others.update((case.kind, one.kind) for one in result.others)
        self.misses += [_miss(result, score) for score in result.scores if _wrong(score)]

    def merge(self, other: Found) -> None:
        """Adds what was measured elsewhere."""
        self.judged += other.judged
        self.misses += other.misses
        self.others += other.others
        self.clean_steps += other.clean_steps
        self.alarms += other.alarms
        self.confirmed, self.cheap = self.confirmed + other.confirmed, self.cheap + other.cheap
        self.speeds += other.speeds


class Kept:
    """What was measured so far, case by case, in a file (pickles, one after the other); without one, in memory only."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._known: dict[str, Found] = {}
        if file is not None and file.exists():
            with file.open("rb") as stream, suppress(EOFError):
                while True:
                    name, found = pickle.load(stream)
                    self._known[name] = found

    def found(self, name: str, measure: Callable[[], Found]) -> Found:
        """What is known of a case, measured now if it is not."""
        if name not in self._known:
            self._known[name] = measure()
            if self._file is not None:
                with self._file.open("ab") as stream:
                    pickle.dump((name, self._known[name]), stream)
        return self._known[name]


def _wrong(score: Score) -> bool:
    return not (score.detected and score.rank) or False in (score.cause, score.layer, score.period)


def _about(result: Result) -> str:
    case, shape = result.job.case, result.job.shape
    noise = f"{shape.noise.kind} {shape.noise.size:.3f}" if shape.noise.kind == "gauss" else shape.noise.kind
    return f"{case}, steps of {shape.step_ns / 1e6:.0f} ms, {noise}, watched 1 in {shape.watched_period}"


def _miss(result: Result, score: Score) -> str:
    said = "; ".join(_incident(one) for one in result.incidents[:4]) or "nothing"
    return f"{_about(result)}: {_expected(score)}; said: {said}"


def _expected(score: Score) -> str:
    truth = score.truth
    return (
        f"{truth.kinds[0]} of {truth.ranks} in {truth.phases} from step {truth.since}, period {truth.period}, params "
        f"{truth.params}, {len(truth.strikes)} strikes, {truth.cost_ns / 1e6:.0f} ms, strength "
        f"{'–' if score.strength is None else round(score.strength, 1)}"
    )


def _incident(incident: Any) -> str:
    return (
        f"{incident.kind} of {incident.ranks} in {incident.phase or '?'} from step {incident.since_step}, period "
        f"{incident.period}, param {incident.param}, {incident.cost_ns / 1e6:.0f} ms, {incident.severity}"
    )


# -- made-up jobs --------------------------------------------------------------------------------------------


def clean_cases(steps: int) -> Iterator[Case]:
    """Runs in which nothing goes wrong, of all noises and sizes, one after the other."""
    for seed in range(steps // RUN_STEPS):
        world = CLEAN_WORLDS[seed // len(NOISES) % len(CLEAN_WORLDS)]
        yield Case("clean", 0.0, world, seed, NOISES[seed % len(NOISES)])


def simulated(args: argparse.Namespace) -> Found:
    """Plays all cases; Ctrl-C keeps those played so far."""
    found, kept = Found(), Kept(args.resume)
    faulty = list(cases(tuple(args.kinds), tuple(args.ranks), args.seeds, NOISES))
    with Rounds() as rounds:
        for case in rounds.over(faulty, "faults"):
            found.merge(kept.found(str(case), partial(_played, case)))
        done = len(found.speeds)
        for case in rounds.over(list(clean_cases(args.clean_steps)), "clean runs"):
            found.merge(kept.found(str(case), partial(_played, case)))
    print(f"{rounds_done(done, len(faulty), 'case')}; {found.clean_steps} clean steps")
    return found


def _played(case: Case) -> Found:
    found = Found()
    found.add(play(job_of(case), ask_oracle=True))
    return found


# -- real jobs -----------------------------------------------------------------------------------------------


def real(args: argparse.Namespace) -> Found:
    """Runs all jobs; Ctrl-C ends the one that runs, and keeps those that are over."""
    found, kept = Found(), Kept(args.resume)
    worlds = [world for world in args.ranks if world in REAL_WORLDS]
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    jobs = [(script, world, seed) for seed in seeds for world in worlds for script in args.scripts]
    share = args.clean_steps // (2 * len(worlds)) if worlds else 0
    with Rounds() as rounds, suppress(StoppedError):
        stop = partial(getattr, rounds, "stop_requested")
        for script, world, seed in rounds.over(jobs, "jobs with faults"):
            name = f"{script}, {world} ranks, seed {seed}"
            found.merge(kept.found(name, lambda: _real(real_run(script, world, seed, stop, args.keep), name)))  # noqa: B023 (called at once)
        script = args.scripts[0]
        for world, disturbed in rounds.over(list(product(worlds, (False, True)) if share else []), "clean jobs"):
            company = "with other work beside it" if disturbed else "alone"
            name = f"{share} clean steps, {script}, {world} ranks, {company}"
            run = partial(clean_run, script, world, share, disturbed, stop, args.keep)
            found.merge(kept.found(name, lambda: _real(run(), name)))  # noqa: B023
    print(f"{len(found.judged)} faults; {found.clean_steps} clean steps")
    print(f"{found.cheap} faults cost less than 5 % of a step, and do not count")
    print(
        f"{found.confirmed} warnings that DDP's logger (exposed, slower) or the kernel (late, without a core) confirms"
    )
    return found


def _real(run: RealRun, what: str) -> Found:
    found = Found()
    found.add_real(run, what)
    return found


# -- results -------------------------------------------------------------------------------------------------


def speed_rows(found: Found) -> list[list[str]]:
    """CPU time per rank-step by the number of ranks; of a core, at five steps a second."""
    rows = []
    for world in sorted({world for world, _, _ in found.speeds}):
        speeds = [(engine, facts) for ranks, engine, facts in found.speeds if ranks == world]
        engine, facts = (sum(column) / len(speeds) / 1e3 for column in zip(*speeds, strict=True))
        cores = (f"{100 * cost * world * STEPS_PER_S / 1e6:.1f} %" for cost in (engine, engine + facts))
        rows.append([str(world), str(len(speeds)), f"{engine:.2f}", f"{facts:.2f}", *cores])
    return rows


def speed_row(found: Found) -> Row:
    """The engine at 1,024 ranks and five steps a second, against its goal."""
    name = f"engine, {MOST_RANKS} ranks × {STEPS_PER_S} steps/s"
    goal = f"≤ {100 * CORE_SHARE:.0f} % of a core"
    costs = [engine for world, engine, _ in found.speeds if world == MOST_RANKS]
    if not costs:
        return Row(name, goal, "–", 0, "–", None)
    share = sum(costs) / len(costs) * MOST_RANKS * STEPS_PER_S / 1e9
    return Row(name, goal, f"{100 * share:.1f} %", len(costs), "–", share <= CORE_SHARE)


def show(found: Found, goals: Goals, most_misses: int) -> None:
    """Prints the tables."""
    print("\n".join(by_kind(found.judged)))
    if found.others:
        others = ", ".join(f"{kind}: {count} {what}" for (kind, what), count in sorted(found.others.items()))
        print(f"besides the fault: {others}")
    rows = goal_rows(found.judged, goals)
    rows.append(alarm_row(found.alarms, found.clean_steps, goals))
    if found.speeds:
        header = ["ranks", "runs", "engine µs per rank-step", "figures µs", "of a core at 5 steps/s", "with figures"]
        print("\n" + "\n".join(table(header, speed_rows(found))))
        rows.append(speed_row(found))
    print("\n" + "\n".join(goals_table(rows)))
    for miss in found.misses[:most_misses]:
        print(f"miss: {miss}")


# -- command line --------------------------------------------------------------------------------------------


def _scripts(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(SCRIPTS):
        raise argparse.ArgumentTypeError(f"no script is called {min(unknown)!r}; there are {', '.join(SCRIPTS)}")
    return text.split(",")


def _names(text: str) -> list[Kind]:
    kinds = [kind for kind in KINDS if kind in text.split(",")]
    if len(kinds) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"kinds are {', '.join(KINDS)}")
    return kinds


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parsed(argv: Iterable[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="jobs on this machine instead of made-up ones")
    parser.add_argument("--quick", action="store_true", help="fewer seeds and fewer clean steps")
    parser.add_argument("--seeds", type=int, help=f"rounds of cases (default: {SEEDS}; real: 1)")
    parser.add_argument("--first-seed", type=int, default=0, help="real: the first round (default: %(default)s)")
    worlds = f"default: {WORLDS}; real: {USUAL_REAL_WORLDS}"
    parser.add_argument("--ranks", type=_numbers, metavar="N,N,…", help=worlds)
    scripts = f"real: {', '.join(SCRIPTS)} (default: {','.join(USUAL_SCRIPTS)}); clean steps are of the first"
    parser.add_argument("--scripts", type=_scripts, default=list(USUAL_SCRIPTS), metavar="SCRIPT,…", help=scripts)
    parser.add_argument("--kinds", type=_names, default=list(KINDS), metavar="KIND,…", help=", ".join(KINDS))
    parser.add_argument(
        "--clean-steps", type=int, help=f"without a fault (default: {CLEAN_STEPS}; real: {REAL_CLEAN_STEPS})"
    )
    parser.add_argument("--misses", type=int, default=20, help="how many misses to print (default: %(default)s)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep what is measured, and go on from there")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep real jobs, and diagnose again those kept before")
    args = parser.parse_args(None if argv is None else list(argv))
    usual = (QUICK_SEEDS, REAL_CLEAN_STEPS) if args.real else (SEEDS, CLEAN_STEPS)
    seeds, steps = (QUICK_SEEDS, QUICK_CLEAN_STEPS // (10 if args.real else 1)) if args.quick else usual
    args.ranks = args.ranks or list(USUAL_REAL_WORLDS if args.real else WORLDS)
    args.seeds = seeds if args.seeds is None else args.seeds
    args.clean_steps = steps if args.clean_steps is None else args.clean_steps
    return args


def main() -> int:
    args = parsed()
    found = real(args) if args.real else simulated(args)
    show(found, REAL if args.real else SIMULATED, args.misses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
