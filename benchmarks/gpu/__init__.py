"""What needs a GPU to be measured. Each part runs by itself; `python -m benchmarks.gpu` runs all of them."""
