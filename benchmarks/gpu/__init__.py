"""Measures what needs a GPU. Each part runs by itself; `python -m benchmarks.gpu` runs all of them."""
