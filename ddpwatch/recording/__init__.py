"""Recordings: the frames of a run with their receive times, in MCAP files. `ddpwatch.open_recording` reads one."""
