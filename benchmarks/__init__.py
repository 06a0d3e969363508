"""What ddpwatch costs, and whether its figures are right; `python -m benchmarks` runs them."""
