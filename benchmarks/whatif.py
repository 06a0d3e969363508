"""Checks whether `ddpwatch whatif` is right: jobs on links of known rates, each setting predicted from each other one.

    python benchmarks/whatif.py [--part NAME] [--keep DIR] [--quick] [--rounds 2] [--only gpt-2-1000]

``--part pairs`` runs bucket caps, fp16, PowerSGD and a straggler on three links. ``--part paced`` does the same with
models whose compute is pauses: as on GPUs, the hosts' cores are free for communication, and step times do not drift.
``--part options`` runs the first bucket's cap, DDP's options, bf16, accumulation, and two and three ranks. All need
root (network namespaces with ``tc tbf``); without it, they say so and end.

One job per network trains with all settings, one after the other in the same processes, and records every step in full.
Every pair of settings that differ in one thing is a prediction: from the recording of the one, the measured step of the
other. With ``--rounds N``, all settings run N times, each time in another order: a machine that drifts then slows none
of them alone. A prediction is the mean of what the rounds' recordings say, and what it predicts the mean of the rounds.
``--keep DIR`` leaves the recordings, and uses those that are there; ``--again DIR`` predicts once more from them alone,
which needs no root. ``the same buckets`` are caps that make equal buckets: their predictions say that nothing changes,
so their errors are how much two runs of one setting differ, and no prediction can be better than that.

The columns:
    pairs       predictions
    median, p90, p95 of the error: the difference from the measured step, as a share of it
    inside      how often a run's mean step is within the 90 % interval that one recording predicts
    width       of half that interval, as a share of the measured step; the median
Then median and p90 of each model and of each link that was recorded.

The best cap: how often the one that is called best is within 2 % of the best of those measured, where caps with equal
buckets are one, measured more than once; and how often a perfect prediction would be, given how much runs vary.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from math import hypot
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.whatif_jobs import (
    PACED_MODELS,
    ROOT,
    Setting,
    is_paced,
    option_settings,
    pair_settings,
    read_runs,
    read_wires,
    record,
)
from ddpwatch.common.text import table
from ddpwatch.common.units import NS_PER_MS
from ddpwatch.whatif.answer import Prediction, WhatIf
from ddpwatch.whatif.model import noise
from ddpwatch.whatif.recorded import Recorded
from ddpwatch.whatif.scenarios import Change
from ddpwatch.whatif.wire import Wire
from demo.shaped_network import why_not
from tests.support.rounds import Rounds, rounds_done

STEPS = 50
NEAR_BEST = 0.02
WORST_SHOWN = 12
DRAWS = 2000
PARTS: dict[str, Callable[[int, bool], Iterator[Setting]]] = {
    "pairs": pair_settings,
    "paced": partial(pair_settings, models=PACED_MODELS),
    "options": option_settings,
}
WITH_WIRE = ", with wire.json"
HOOK_GOAL = "4 %, p90 8 %"
GOALS = {
    "reproduced": "1 %, p95 2 %",
    "another cap": "3 %, p90 7 %",
    f"another cap{WITH_WIRE}": "2 %, p90 5 %",
    **dict.fromkeys(("fp16", "powersgd", "another link", "straggler removed"), HOOK_GOAL),
}


@dataclass(frozen=True)
class Scored:
    """One prediction against what was measured. ``error`` and ``width`` (half the interval) are shares of that.

    ``inside``: of all pairs of a recording and a run of the target, in which share the run is within the interval.
    """

    kind: str
    source: str
    target: str
    predicted_ms: float
    measured_ms: float
    error: float
    inside: float
    width: float

    def within(self, part: str) -> bool:
        """Whether its source is of this model or link."""
        return part in self.source.split("-")


def main(argv: Sequence[str] | None = None) -> int:
    """Records, predicts, prints the table; the exit code is 0 also where there can be no such network."""
    args = _parser().parse_args(argv)
    reason = "" if args.again else why_not()
    if reason:
        print(f"skipped: {reason}")
    elif args.again is not None:
        report(args.again)
    else:
        _record_and_report(args)
    return 0


def _record_and_report(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="ddpwatch-whatif-") as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        wanted = [setting for setting in PARTS[args.part](args.rounds, args.quick) if args.only in setting.name]
        with Rounds() as rounds:
            done = sum(1 for _ in record(wanted, folder, args.steps, rounds, sweeps=args.part != "options"))
        print(rounds_done(done, len(wanted), "setting"))
        report(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="pairs", help="what to check (default: pairs)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the recordings in DIR, and use those in it")
    parser.add_argument("--again", type=Path, metavar="DIR", help="predict from the recordings in DIR only")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings whose names contain it: gpt-2-1000")
    parser.add_argument("--quick", action="store_true", help="one link, and of the pairs one model and three caps")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="per setting and round")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="of all settings")
    return parser


def report(folder: Path) -> None:
    """Predicts every pair in the folder and prints the table."""
    runs = dict(read_runs(folder))
    wires = read_wires(folder, paced=all(is_paced(setting.model) for setting in runs))
    ways: list[tuple[str, dict[str, Wire]]] = [("", {}), *([(WITH_WIRE, wires)] if wires else [])]
    scored = [one for suffix, known in ways for one in score(runs, known, suffix)]
    (folder / "scored.json").write_text(json.dumps([asdict(one) for one in scored], indent=1))
    kinds = list(dict.fromkeys(one.kind for one in scored))
    rows = [row(kind, [one for one in scored if one.kind == kind]) for kind in kinds]
    print("\n".join(table(["", "goal", "pairs", "median", "p90", "p95", "inside", "width"], rows)))
    parts = list(dict.fromkeys(part for one in runs for part in (one.model.partition(":")[0], f"{one.mbit:g}")))
    parts.sort(key=lambda part: (part.isdigit(), part.zfill(9)))
    rows = [[kind, *(cell([one for one in scored if one.kind == kind and one.within(part)]) for part in parts)]
            for kind in kinds]  # fmt: skip
    print("\n".join(["", *table(["median / p90, %", *parts], rows)]))
    print("\n".join(["", "the largest misses:", *worst(scored)]))
    for label, known in ways:
        best = best_caps(runs, known)
        if best.asked:
            print(f"the cap called best is within {NEAR_BEST:.0%} of the best{label}: {best}")


def worst(scored: Sequence[Scored]) -> Iterator[str]:
    """The largest misses, to see where they come from."""
    for one in sorted(scored, key=lambda one: -abs(one.error))[:WORST_SHOWN]:
        pair = f"{one.source} -> {one.target}"
        yield f"{one.error:+.1%}: {pair}: {one.predicted_ms:.1f} ms, measured {one.measured_ms:.1f}"


def row(kind: str, scored: Sequence[Scored]) -> list[str]:
    """A line of the table."""
    errors = [abs(one.error) for one in scored]
    spread = [f"{quantile(errors, share):.1%}" for share in (0.9, 0.95)]
    inside = f"{fmean(one.inside for one in scored):.0%}"
    goal = GOALS.get(kind) or GOALS.get(kind.removesuffix(WITH_WIRE), "")
    said = [inside, f"{median(one.width for one in scored):.1%}"] if any(one.width for one in scored) else ["", ""]
    return [kind, goal, str(len(errors)), f"{median(errors):.1%}", *spread, *said]


def cell(scored: Sequence[Scored]) -> str:
    """Median and p90 of the error, in percent."""
    if not scored:
        return ""
    errors = [100 * abs(one.error) for one in scored]
    return f"{median(errors):.1f} / {quantile(errors, 0.9):.1f}"


def quantile(errors: Sequence[float], share: float) -> float:
    """At most so much in this share of the cases."""
    return sorted(errors)[min(len(errors) - 1, int(share * len(errors)))]


def changes(source: Setting, target: Setting) -> tuple[str, Change] | None:
    """What turns one setting into the other: the table's row and the change; None if it is not one thing."""
    differ = [f.name for f in fields(Setting) if getattr(source, f.name) != getattr(target, f.name)]
    if source.hook or len(differ) != 1:
        return None
    return _CHANGES[differ[0]](source, target) if differ[0] in _CHANGES else None


def _hook(source: Setting, target: Setting) -> tuple[str, Change]:
    return target.hook, Change(hook="powersgd-2" if target.hook == "powersgd" else target.hook)


def _straggler(source: Setting, target: Setting) -> tuple[str, Change] | None:
    return ("straggler removed", Change(without_lateness_of=1)) if source.straggler else None


def _cap(source: Setting, target: Setting) -> tuple[str, Change]:
    kind = "another cap" if source.cap_mib != target.cap_mib else "another first cap"
    return kind, Change(cap_mib=target.cap_mib, first_mib=target.first_mib or None)


def _option(name: str) -> Callable[[Setting, Setting], tuple[str, Change] | None]:
    change: dict[str, Any] = {name: True}
    return lambda source, target: (name, Change(**change)) if getattr(target, name) else None


def _accumulate(source: Setting, target: Setting) -> tuple[str, Change] | None:
    """A step of the target has so many batches; predictions are per batch."""
    name = f"accumulation over {target.accumulate}"
    return (name, Change(accumulate=target.accumulate)) if source.accumulate == 1 else None


_CHANGES: dict[str, Callable[[Setting, Setting], tuple[str, Change] | None]] = {
    "cap_mib": _cap,
    "first_mib": _cap,
    "hook": _hook,
    "mbit": lambda source, target: ("another link", Change(link=target.mbit / source.mbit)),
    "straggler": _straggler,
    "bucket_view": _option("bucket_view"),
    "static_graph": _option("static_graph"),
    "accumulate": _accumulate,
    "ranks": lambda source, target: (f"{source.ranks} → {target.ranks} ranks", Change(world=target.ranks)),
}


def by_setting(runs: dict[Setting, Recorded]) -> dict[Setting, list[Recorded]]:
    """The recordings of all rounds of each setting."""
    settings: dict[Setting, list[Recorded]] = {}
    for setting, recorded in runs.items():
        settings.setdefault(replace(setting, round=0), []).append(recorded)
    return settings


def score(runs: dict[Setting, Recorded], wires: dict[str, Wire], suffix: str) -> Iterator[Scored]:
    """Predicts each pair; with ``wires``, only what a sweep may help."""
    settings = by_setting(runs)
    for source, recordings in settings.items():
        if wires and source.wire not in wires:
            continue
        asked = [WhatIf(recorded, wires.get(source.wire)) for recorded in recordings]
        yield from reproduced(source, recordings, asked, suffix)
        for target, measured in settings.items():
            found = changes(source, target)
            if found is None:
                continue
            kind, change = found
            if kind == "another cap" and recordings[0].sizes == measured[0].sizes:
                kind = "the same buckets"
            steps_ms = [step_ms(run) / (target.accumulate / source.accumulate) for run in measured]
            answers = [answer for one in asked for answer in one.ask([change])]
            if answers:
                yield scored(kind + suffix, source, target, answers, steps_ms)


def reproduced(
    source: Setting, recordings: Sequence[Recorded], asked: Sequence[WhatIf], suffix: str
) -> Iterator[Scored]:
    """Each recording against itself, and as a prediction of each other one of its setting."""
    for recorded, one in zip(recordings, asked, strict=True):
        measured_ms, replayed_ms = step_ms(recorded), one.replayed.mean / NS_PER_MS
        yield Scored(f"reproduced{suffix}", source.name, source.name, replayed_ms, measured_ms,
                     replayed_ms / measured_ms - 1, 1.0, 0.0)  # fmt: skip
        others = [other for other in recordings if other is not recorded]
        answers = one.ask([Change()]) if others else []
        for other in others:
            yield scored(f"the same setting again{suffix}", source, source, answers, [step_ms(other)])


def scored(
    kind: str, source: Setting, target: Setting, answers: Sequence[Prediction], steps_ms: Sequence[float]
) -> Scored:
    """The mean of what the rounds' recordings predict, against the mean of what the rounds measured."""
    predicted_ms, measured_ms = fmean(one.step_ms for one in answers), fmean(steps_ms)
    return Scored(
        kind, source.name, target.name, predicted_ms, measured_ms, predicted_ms / measured_ms - 1,
        inside=fmean(one.low <= run_ms <= one.high for one in answers for run_ms in steps_ms),
        width=fmean(one.high - one.step_ms for one in answers) / measured_ms,
    )  # fmt: skip


def step_ms(recorded: Recorded) -> float:
    """The mean step of a run."""
    return recorded.measured_ns / NS_PER_MS


@dataclass(frozen=True)
class Best:
    """How often the best cap was found, of how many recordings; and how often a perfect prediction would have."""

    found: int
    possible: float
    asked: int

    def __str__(self) -> str:
        share, possible = self.found / max(1, self.asked), self.possible / max(1, self.asked)
        return f"{self.found} of {self.asked} ({share:.0%}; a perfect prediction: {possible:.0%})"


def best_caps(runs: dict[Setting, Recorded], wires: dict[str, Wire]) -> Best:
    """How often the cap that is called best is near the best of those measured."""
    found, possible, asked = 0, 0.0, 0
    settings = by_setting(runs)
    for source, recordings in settings.items():
        peers = {
            target.cap_mib: measured
            for target, measured in settings.items()
            if not source.hook and replace(source, cap_mib=target.cap_mib) == target
        }
        measured = measured_by_buckets([run for rounds in peers.values() for run in rounds])
        if len(measured) < 2 or (wires and source.wire not in wires):
            continue
        best = min(measured.values())[0]
        for recorded in recordings:
            asked_for = WhatIf(recorded, wires.get(source.wire)).ask([Change(cap_mib=cap) for cap in peers])
            if asked_for and asked_for[0].cap_mib is not None:
                asked += 1
                chosen = measured[tuple(peers[asked_for[0].cap_mib][0].sizes)]
                found += chosen[0] <= (1 + NEAR_BEST) * best
                possible += perfect(list(measured.values()))
    return Best(found, possible, asked)


def measured_by_buckets(runs: Sequence[Recorded]) -> dict[tuple[int, ...], tuple[float, float]]:
    """Per sizes of the buckets, the mean step of the runs that have them, and by how much it may be off."""
    groups: dict[tuple[int, ...], list[Recorded]] = {}
    for run in runs:
        groups.setdefault(tuple(run.sizes), []).append(run)
    return {
        sizes: (
            fmean(run.measured_ns for run in group),
            hypot(*(noise([fmean(rank.end - rank.start for rank in step) for step in run.steps]) for run in group))
            / len(group),
        )
        for sizes, group in groups.items()
    }


def perfect(measured: Sequence[tuple[float, float]]) -> float:
    """How often the truly best one is near the best one measured, if truth is as far off as runs vary."""
    dice, near = random.Random(0), (1 + NEAR_BEST) * min(measured)[0]
    hits = 0
    for _ in range(DRAWS):
        truth = [dice.gauss(mean, error) for mean, error in measured]
        hits += measured[truth.index(min(truth))][0] <= near
    return hits / DRAWS


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
