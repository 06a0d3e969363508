"""What `ddpwatch run` adds to the job. ``path/`` goes onto the PYTHONPATH, so it holds nothing else."""
