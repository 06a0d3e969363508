"""A run on this machine: its files, its clock, and the processes that ddpwatch starts for it."""
