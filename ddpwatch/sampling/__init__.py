"""Sampling keeps the cost of watching within a budget: few steps are recorded in full, some are not watched at all.

- `levels`: how much of a step is recorded, and which figures that allows.
- `schedule`: which step gets which level, the same one on every rank.
- `lease`: how much that may cost while somebody looks.
- `cost`: what watching costs, from the CPU time of neighbouring steps of different levels.

See docs/sampling.md.
"""
