"""Recordings: raw frames with their receive time, in MCAP files."""
