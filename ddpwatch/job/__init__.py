"""What `ddpwatch run` adds to a job. ``path/`` goes onto its PYTHONPATH (by `launch.py`), so it holds nothing else."""
