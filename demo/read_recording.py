"""Reads a recording as data, from top to bottom or cell by cell in a notebook.

    torchrun --standalone --nproc-per-node=2 demo/train.py --steps 60 --record ddpwatch.mcap
    python demo/read_recording.py ddpwatch.mcap

The first command makes a recording to read.
"""

# %% Open it. This only reads the index, so that the size hardly matters.
import sys
from collections import Counter
from statistics import median

from ddpwatch import open_recording
from ddpwatch.errors import DdpwatchError

try:
    run = open_recording(sys.argv[1] if len(sys.argv) > 1 else "ddpwatch.mcap")
except DdpwatchError as error:
    print(f"{error.message}\nhint: {error.hint}", file=sys.stderr)
    sys.exit(error.exit_code)
print(f"{run.metadata['run_id']}: steps {run.step_range}")

# %% Who ran, and how they ended.
for rank in run.ranks():
    print(f"rank {rank.rank} on {rank.host}: {rank.steps} steps, {rank.end or 'no end recorded'}")

# %% The figures of `ddpwatch report --json`.
metrics = run.metrics()
print("overlap", metrics["overlap"], "phases", metrics["phases_ms"])

# %% Typed rows: which rank launched last, step by step?
late = Counter(row.rank for row in run.steps() if row.late_ms is not None and row.wait_ms == 0)
print("launched last:", dict(late.most_common()))

# %% Buckets: which one leaves communication exposed?
exposed: dict[int, list[float]] = {}
for bucket in run.collectives():
    if bucket.exposed_ms is not None:
        exposed.setdefault(bucket.bucket, []).append(bucket.exposed_ms)
for index, values in sorted(exposed.items()):
    print(f"bucket {index}: {median(values):.2f} ms exposed (p50)")

# %% Columns, for pandas, polars, numpy or pyarrow: `pandas.DataFrame(run.columns("steps"))`.
columns = run.columns("steps")
print(f"{len(columns)} columns of {len(columns['step'])} rows: {', '.join(columns)}")

# %% A part of the steps, found through the index.
first, last = run.step_range or (0, 0)
middle = (first + last) // 2
some = run.select(steps=f"{middle}:{middle + 5}", ranks="0")
print("rank 0 around the middle:", [round(row.step_ms, 1) for row in some.steps() if row.step_ms is not None])
