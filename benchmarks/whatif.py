"""Whether `ddpwatch whatif` is right: jobs on links of known rates, each setting predicted from each other one.

    python benchmarks/whatif.py [--keep DIR] [--quick] [--rounds 2] [--only gpt-2-1000]

Needs root (network namespaces with ``tc tbf``); without it, it says so and ends. Each job records every step in full.
Every pair of settings that differ in one thing is a prediction: from the recording of the one, the measured step of the
other. ``--keep DIR`` leaves the recordings, and uses those that are there; ``--again DIR`` predicts once more from them
alone, which needs no root. ``the same buckets`` are caps that make equal buckets: their predictions say that nothing
changes, so their errors are how much two runs of one setting differ, and no prediction can be better than that.

The columns:
    pairs       predictions
    median, p90 of the error: the difference from the measured step, as a share of it
    inside      how often the measured step is within the 90 % interval
    width       of half that interval, as a share of the measured step; the median
Then median and p90 of each model (constants were set with the first one only) and of each link that was recorded.

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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import hypot
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.rounds import Rounds, rounds_done
from benchmarks.shaped_network import run_job, shaped_network, why_not
from ddpwatch.analysis.step import NS_PER_MS
from ddpwatch.analysis.whatif.answer import WhatIf
from ddpwatch.analysis.whatif.model import noise
from ddpwatch.analysis.whatif.recorded import Recorded
from ddpwatch.analysis.whatif.scenarios import Change
from ddpwatch.analysis.whatif.wire import Wire
from ddpwatch.errors import DdpwatchError
from ddpwatch.report.format import table
from ddpwatch.report.whatif import read_wire, recorded_in

ROOT = Path(__file__).resolve().parents[1]
LINKS_MBIT = (200.0, 1000.0, 4000.0)
CAPS_MIB = (1.0, 2.0, 5.0, 10.0, 25.0, 60.0)
MODELS = ("gpt:width=384,layers=4", "mlp:width=1536,layers=6")
RANKS = (2, 3)
CAPS_OF_MORE_MIB = (1.0, 5.0, 25.0)  # with more than two ranks, which take longer
HOOKS = ("fp16", "powersgd")
HOOK_CAP_MIB = 5.0
STRAGGLER_MS = 40
STEPS = 50
NEAR_BEST = 0.02
WORST_SHOWN = 12
DRAWS = 2000
QUICK = {"links": (1000.0,), "models": MODELS[:1], "ranks": (2,), "caps": (1.0, 5.0, 25.0)}


@dataclass(frozen=True)
class Setting:
    """One job. ``hook`` is empty without a comm hook."""

    model: str
    ranks: int
    mbit: float
    cap_mib: float
    hook: str = ""
    straggler: bool = False
    round: int = 0

    @property
    def name(self) -> str:
        """For its files."""
        model = self.model.partition(":")[0]
        late = "-late" if self.straggler else ""
        hook = f"-{self.hook}" if self.hook else ""
        return f"{model}-{self.ranks}-{self.mbit:g}-{self.cap_mib:g}{hook}{late}-{self.round}"

    @property
    def wire(self) -> str:
        """The name of the sweep of its link."""
        return f"wire-{self.ranks}-{self.mbit:g}.json"

    def command(self, file: Path, steps: int) -> list[str]:
        """The job's script and options."""
        options = ["--model", self.model, "--batch-size", "4", "--bucket-cap-mb", f"{self.cap_mib:g}"]
        options += ["--data", "digits"] if self.model.startswith("mlp") else []
        options += ["--comm-hook", self.hook] if self.hook else []
        options += ["--powersgd-rank", "2", "--powersgd-start", "2"] if self.hook == "powersgd" else []
        options += ["--inject", f"slow-backward:rank=1,ms={STRAGGLER_MS}"] if self.straggler else []
        return [str(ROOT / "demo" / "train.py"), *options, "--steps", str(steps), "--record", str(file)]


@dataclass(frozen=True)
class Scored:
    """One prediction against what was measured. ``error`` and ``width`` (half the interval) are shares of that."""

    kind: str
    source: str
    target: str
    predicted_ms: float
    measured_ms: float
    error: float
    inside: bool
    width: float

    def within(self, part: str) -> bool:
        """Whether its source is of this model or link."""
        return part in self.source.split("-")


def main(argv: Sequence[str] | None = None) -> int:
    """Records, predicts, prints the table; the exit code is 0 also where there can be no such network."""
    args = _parser().parse_args(argv)
    if args.again is not None:
        report(args.again)
        return 0
    reason = why_not()
    if reason:
        print(f"skipped: {reason}")
        return 0
    with tempfile.TemporaryDirectory(prefix="ddpwatch-whatif-") as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        wanted = [setting for setting in settings(args) if args.only in setting.name]
        with Rounds() as rounds:
            done = sum(1 for _ in record(wanted, folder, args.steps, rounds))
        print(rounds_done(done, len(wanted)))
        report(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the recordings in DIR, and use those in it")
    parser.add_argument("--again", type=Path, metavar="DIR", help="predict from the recordings in DIR only")
    parser.add_argument("--only", default="", metavar="TEXT", help="jobs whose names contain it: gpt-2-1000")
    parser.add_argument("--quick", action="store_true", help="one link, one model, two ranks, three caps")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="per job")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="of each job")
    return parser


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    """All jobs. Rounds are outermost, so that what disturbs the machine for a while does not hit one setting only."""
    chosen: dict[str, Any] = QUICK if args.quick else {}
    for number in range(args.rounds):
        for ranks in chosen.get("ranks", RANKS):
            for mbit in chosen.get("links", LINKS_MBIT):
                for model in chosen.get("models", MODELS):
                    caps = chosen.get("caps", CAPS_MIB if ranks == 2 else CAPS_OF_MORE_MIB)
                    plain = [Setting(model, ranks, mbit, cap, round=number) for cap in caps]
                    yield from plain
                    at = replace(plain[0], cap_mib=HOOK_CAP_MIB)
                    yield from (replace(at, hook=hook) for hook in HOOKS)
                    yield replace(at, straggler=True)


def record(wanted: Sequence[Setting], folder: Path, steps: int, rounds: Rounds) -> Iterator[Setting]:
    """Runs the jobs that have no recording in the folder yet, and a sweep per network."""
    for setting in rounds.over(wanted, "jobs"):
        file = folder / f"{setting.name}.mcap"
        described = file.with_suffix(".json")
        if not described.exists():
            file.unlink(missing_ok=True)
            with shaped_network(setting.ranks, setting.mbit):
                environment = {"DDPWATCH_STEPS": "full", "PYTHONPATH": str(ROOT)}
                if not (folder / setting.wire).exists():
                    sweep = ["-m", "ddpwatch.sweep", "-o", str(folder / setting.wire), "--max-size", "64"]
                    run_job(sweep, setting.ranks, folder / "sweep.log", environment)
                run_job(setting.command(file, steps), setting.ranks, file.with_suffix(".log"), environment)
            described.write_text(json.dumps(asdict(setting)))
        yield setting


def report(folder: Path) -> None:
    """Predicts every pair in the folder and prints the table."""
    runs = dict(read_runs(folder))
    scored = list(score(runs, {}, "")) + list(score(runs, read_wires(folder), ", with wire.json"))
    (folder / "scored.json").write_text(json.dumps([asdict(one) for one in scored], indent=1))
    kinds = list(dict.fromkeys(one.kind for one in scored))
    rows = [row(kind, [one for one in scored if one.kind == kind]) for kind in kinds]
    print("\n".join(table(["", "pairs", "median", "p90", "inside", "width"], rows)))
    parts = list(dict.fromkeys(part for one in runs for part in (one.model.partition(":")[0], f"{one.mbit:g}")))
    parts.sort(key=lambda part: (part.isdigit(), part.zfill(9)))
    rows = [[kind, *(cell([one for one in scored if one.kind == kind and one.within(part)]) for part in parts)]
            for kind in kinds]  # fmt: skip
    print("\n".join(["", *table(["median / p90, %", *parts], rows)]))
    print("\n".join(["", "the largest misses:", *worst(scored)]))
    for label, wires in (("", {}), (", with wire.json", read_wires(folder))):
        print(f"the cap called best is within {NEAR_BEST:.0%} of the best{label}: {best_caps(runs, wires)}")


def worst(scored: Sequence[Scored]) -> Iterator[str]:
    """The largest misses, to see where they come from."""
    for one in sorted(scored, key=lambda one: -abs(one.error))[:WORST_SHOWN]:
        pair = f"{one.source} -> {one.target}"
        yield f"{one.error:+.1%}: {pair}: {one.predicted_ms:.1f} ms, measured {one.measured_ms:.1f}"


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


def read_wires(folder: Path) -> dict[str, Wire]:
    """The sweeps, by name."""
    return {file.name: read_wire(file) for file in folder.glob("wire-*.json")}


def row(kind: str, scored: Sequence[Scored]) -> list[str]:
    """A line of the table."""
    errors = [abs(one.error) for one in scored]
    width = median(one.width for one in scored)
    inside = sum(one.inside for one in scored) / len(scored)
    return [kind, str(len(errors)), f"{median(errors):.1%}", f"{p90(errors):.1%}", f"{inside:.0%}", f"{width:.1%}"]


def cell(scored: Sequence[Scored]) -> str:
    """Median and p90 of the error, in percent."""
    if not scored:
        return ""
    errors = [100 * abs(one.error) for one in scored]
    return f"{median(errors):.1f} / {p90(errors):.1f}"


def p90(errors: Sequence[float]) -> float:
    """At most so much in nine of ten."""
    return sorted(errors)[min(len(errors) - 1, int(0.9 * len(errors)))]


def changes(source: Setting, target: Setting) -> tuple[str, Change] | None:
    """What turns one setting into the other: the table's row and the change; None if it is not one thing."""
    if source.hook:
        return None
    if replace(source, cap_mib=target.cap_mib, round=target.round) == target:
        if source.cap_mib == target.cap_mib:
            return ("the same setting again", Change()) if source.round != target.round else ("reproduced", Change())
        return "another cap", Change(cap_mib=target.cap_mib)
    if replace(source, hook=target.hook, round=target.round) == target:
        return target.hook, Change(hook="powersgd-2" if target.hook == "powersgd" else target.hook)
    if replace(source, mbit=target.mbit, round=target.round) == target:
        return "another link", Change(link=target.mbit / source.mbit)
    if source.straggler and replace(source, straggler=False, round=target.round) == target:
        return "straggler removed", Change(without_rank=1)
    return None


def score(runs: dict[Setting, Recorded], wires: dict[str, Wire], suffix: str) -> Iterator[Scored]:
    """Predicts each pair; with ``wires``, only what a sweep may help."""
    for source, recorded in runs.items():
        if wires and source.wire not in wires:
            continue
        asked = WhatIf(recorded, wires.get(source.wire))
        for target, measured in runs.items():
            found = changes(source, target)
            if found is None:
                continue
            kind, change = found
            if kind == "another cap" and recorded.sizes == measured.sizes:
                kind = "the same buckets"
            measured_ms = measured.measured_ns / NS_PER_MS
            if kind == "reproduced":
                replayed_ms = asked.replayed.mean / NS_PER_MS
                yield Scored(kind + suffix, source.name, target.name, replayed_ms, measured_ms,
                             replayed_ms / measured_ms - 1, True, 0.0)  # fmt: skip
            for one in asked.ask([change]) if kind != "reproduced" else []:
                error = one.step_ms / measured_ms - 1
                inside = one.low <= measured_ms <= one.high
                yield Scored(kind + suffix, source.name, target.name, one.step_ms, measured_ms, error, inside,
                             (one.high - one.step_ms) / measured_ms)  # fmt: skip


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
    for source, recorded in runs.items():
        peers = {
            target.cap_mib: measured
            for target, measured in runs.items()
            if not source.hook and replace(source, cap_mib=target.cap_mib) == target
        }
        measured = measured_by_buckets(list(peers.values()))
        if len(measured) < 2 or (wires and source.wire not in wires):
            continue
        asked_for = WhatIf(recorded, wires.get(source.wire)).ask([Change(cap_mib=cap) for cap in peers])
        if asked_for and asked_for[0].cap_mib is not None:
            asked += 1
            chosen = measured[tuple(peers[asked_for[0].cap_mib].sizes)]
            found += chosen[0] <= (1 + NEAR_BEST) * min(measured.values())[0]
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
