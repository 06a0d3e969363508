"""What `ddpwatch run` brings into the job: ``path/`` goes onto the PYTHONPATH, so nothing else lies in there."""
