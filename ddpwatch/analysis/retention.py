"""How much of a run is kept: as much by its collector as by a viewer, so that a late viewer knows what others know."""

from typing import Final

KEEP_STEPS: Final = 512  # per rank; with many ranks, memory allows fewer
KEEP_SAMPLES: Final = 600  # per device or rank: ten minutes at one sample a second
KEEP_MARKS: Final = 1000  # of all ranks
