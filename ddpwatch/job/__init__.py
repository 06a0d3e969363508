"""The parts that `ddpwatch run` adds to a job. ``path/`` goes onto its PYTHONPATH, so it holds nothing else."""
