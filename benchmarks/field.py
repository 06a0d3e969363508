"""Judge the diagnosis by jobs that people reported: slow, hanging, unusual and healthy ones, rebuilt small.

    python benchmarks/field.py [NAME ...] [--keep DIR] [--again DIR] [--list]

Each case is a real job of 2 to 4 ranks under ``ddpwatch run --headless --record`` (`tests.support.field`). It is judged
by what the terminal said and by the report: rank, kind, phase, cost within 15 % of what the ranks noted themselves, the
cause where the machine shows one, the steps until it was named, and alarms that are not true. ``--again`` judges kept
recordings without running anything. *Starved* is for how much of their time ranks waited for a core: repeat a case in
which it is much.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from ddpwatch.common.text import table
from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.reader import Recording
from tests.support.field.case import Case
from tests.support.field.cases import CASES
from tests.support.field.judge import OUTPUT, RECORDING, Judgement, judge
from tests.support.fork_server import ROOT

LIMIT_S = 400.0  # of one case
CLOSING_S = 60.0  # for its recording
COLUMNS = ["case", "source", "is", "cost", "named", "starved", "what is wrong", "verdict"]


def main() -> int:
    """Runs or reads the cases, and prints the table."""
    arguments = _arguments()
    cases = [CASES[name] for name in arguments.names or CASES]
    if arguments.list:
        print("\n".join(table(["case", "source", "what"], [[c.name, c.source, c.run.__doc__ or ""] for c in cases])))
        return 0
    keep = arguments.again or arguments.keep
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        judged, unread = list[Judgement](), list[str]()
        for case in cases:
            own = Path(folder) / case.name
            if arguments.again is None:
                run(case, own)
            elif not own.exists():
                continue
            try:
                judged.append(judge(case, own))
            except DdpwatchError as error:
                unread.append(f"{case.name} is not judged: {error}")
                print(unread[-1], file=sys.stderr, flush=True)
            else:
                print("  ".join(_row(judged[-1])), file=sys.stderr, flush=True)
    print("\n".join([*summary(judged), *unread]))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *CASES], metavar="NAME", help="cases; all without any")
    parser.add_argument("--keep", metavar="DIR", help="keep recordings there")
    parser.add_argument("--again", metavar="DIR", help="judge what is kept there, and run nothing")
    parser.add_argument("--list", action="store_true", help="say what there is")
    return parser.parse_args()


def run(case: Case, folder: Path) -> None:
    """Runs a case, and leaves its recording, its output and its ranks' notes in a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    watched = [sys.executable, "-m", "ddpwatch", "run", "--headless", "--record", str(folder / RECORDING), "--"]
    launched = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    job = [sys.executable, *launched, "-m", "tests.support.field.job", case.name, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **case.environment}
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            [*watched, *job], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
    if code and not case.fails:
        print(f"{case.name} failed: {(folder / OUTPUT).read_text()[-1500:]}", file=sys.stderr)
    end = time.monotonic() + CLOSING_S
    while (folder / RECORDING).exists() and time.monotonic() < end:
        if Recording(folder / RECORDING).parts[0].index.complete:
            break
        time.sleep(0.2)


def summary(judged: Sequence[Judgement]) -> list[str]:
    """Returns the table, and how many cases are right."""
    words = Counter(one.word for one in judged)
    total = ", ".join(f"{words[word]} {word}" for word in ("right", "partly", "wrong"))
    agree = [one.parts["live"] for one in judged if "live" in one.parts]
    return [
        *table(COLUMNS, [_row(one) for one in judged]),
        "",
        f"{len(judged)} cases: {total}; terminal and report agree in {sum(agree)} of {len(agree)}; "
        f"{sum(len(one.others) for one in judged)} untrue alarms",
    ]


def _row(one: Judgement) -> list[str]:
    wrong = [name for name, right in one.parts.items() if not right]
    alarms = [f"{alarm.kind} {alarm.ranks or 'all'}" for alarm in one.others]
    cost = "" if one.cost is None else f"{100 * one.cost:+.0f} %"
    starved = "" if one.starved is None else f"{100 * one.starved:.0f} %"
    named = "" if one.named_after is None or not one.case.truth.kinds else str(one.named_after)
    return [
        one.case.name, one.case.source, one.word, cost, named, starved, ", ".join(wrong + alarms), one.verdict[:120],
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
