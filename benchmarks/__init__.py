"""Measures what ddpwatch costs, and checks whether its figures are right; `python -m benchmarks` runs them."""
