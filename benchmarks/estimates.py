"""Compares what reports estimate of all steps with the truth: made-up jobs of which every step is known.

    python benchmarks/estimates.py

Takes some two minutes. Goals: the mean step is at most 0.5 % off, and nine in ten intervals hold what is true. The jobs
are those of `tests/support/known_jobs.py`. The columns:
    step off        of the job's own clock, at most
    exposed off     in the mean; beside it, the interval
    held            how many intervals of 95 % hold what is true of all steps
"""

from __future__ import annotations

from statistics import fmean, median

from tests.support.known_jobs import JOBS, PERIODS, judged

RUNS = 50


def main() -> None:
    print(f"{'job':>14} {'steps':>6} {'bare':>9}   step off   exposed off   interval ±   held: exposed  overlap")
    for draw in JOBS:
        for steps in (300, 1500):
            for percent in PERIODS:
                found = [judged(draw, percent, steps, seed) for seed in range(RUNS)]
                print(
                    f"{draw:>14} {steps:>6} {fmean(one.bare for one in found):>9.0%}"
                    f" {max(abs(one.step) for one in found):>10.3%} {fmean(one.exposed for one in found):>+13.2%}"
                    f" {median(one.exposed_width for one in found):>12.1%}"
                    f" {sum(one.exposed_held for one in found):>9} of {RUNS}"
                    f" {sum(one.overlap_held for one in found):>2} of {RUNS}"
                )


if __name__ == "__main__":
    main()
