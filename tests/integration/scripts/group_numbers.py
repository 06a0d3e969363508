"""The numbers in ``groups.py``, for the test to import without torch."""

STEPS = 120
BAD_EVERY = 10
NAP_S, SLOW_S = 0.002, 0.03
