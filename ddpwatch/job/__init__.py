"""What `ddpwatch run` adds to a job. ``path/`` goes onto the job's PYTHONPATH, so it holds nothing else."""
