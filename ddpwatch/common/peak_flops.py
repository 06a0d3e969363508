"""What GPUs can do at best: dense bf16 matrix products, in FLOP/s, as their makers' data sheets say.

Of NVIDIA's data sheets, half of what they say "with sparsity". `DDPWATCH_PEAK_TFLOPS` in a job's environment says it of
others, or of another type of numbers.
"""

from __future__ import annotations

import math
import re
from typing import Final

PEAK: Final = "DDPWATCH_PEAK_TFLOPS"
TERA: Final = 1e12
# By words of the name, as drivers say it; the first whose words are all there counts.
_TFLOPS: Final = (
    ("GB200", 2500.0),  # GB200 NVL72 data sheet
    ("B200", 2250.0),  # DGX B200 data sheet
    ("GH200", 989.4),  # GH200 Grace Hopper data sheet
    ("H200 NVL", 835.5),  # H200 data sheet
    ("H200", 989.4),
    ("H100 PCIe", 756.5),  # H100 data sheet
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800 PCIe", 756.5),  # H800 data sheet
    ("H800", 989.4),
    ("A100", 312.0),  # A100 data sheet
    ("A800", 312.0),  # A800 data sheet
    ("A30", 165.0),  # A30 data sheet
    ("A40", 149.7),  # A40 data sheet
    ("A10", 125.0),  # A10 data sheet
    ("L40S", 362.0),  # L40S data sheet
    ("L40", 181.0),  # L40 data sheet
    ("L4", 121.0),  # L4 data sheet
    ("MI300X", 1307.4),  # Instinct MI300X data sheet
)


def peak_of(device: str) -> float | None:
    """Returns a GPU's peak (FLOP/s); None if it is not in the table, or only a part of one."""
    words = set(re.split(r"\W+", device))
    if "MIG" in words:
        return None
    return next((TERA * peak for name, peak in _TFLOPS if words.issuperset(name.split())), None)


def parse_peak(text: str) -> float:
    """Reads TFLOP/s as FLOP/s; 0.0 for what is no number above 0."""
    try:
        peak = TERA * float(text)
    except ValueError:
        return 0.0
    return peak if 0 < peak < math.inf else 0.0
