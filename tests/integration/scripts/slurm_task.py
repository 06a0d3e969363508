"""One task of `srun`, without torchrun: rank and address come from SLURM's variables, as users write it."""

import os
import runpy
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[3] / "demo" / "train.py"


def become_a_task() -> None:
    """Leaves nothing of what torchrun sets."""
    os.environ["SLURM_PROCID"] = os.environ["SLURM_LOCALID"] = os.environ["RANK"]
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC", "LOCAL_", "RANK", "WORLD_SIZE", "MASTER_")):
            del os.environ[name]


if __name__ == "__main__":
    become_a_task()
    os.environ.update(
        RANK=os.environ["SLURM_PROCID"],
        LOCAL_RANK=os.environ["SLURM_LOCALID"],
        WORLD_SIZE=os.environ["SLURM_NTASKS"],
        MASTER_ADDR="localhost",
        MASTER_PORT=os.environ["TASK_PORT"],
    )
    runpy.run_path(str(TRAIN), run_name="__main__")
