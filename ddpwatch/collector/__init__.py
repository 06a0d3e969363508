"""The collector process: receives, keeps, publishes and records frames, samples devices. Rank 0 starts it."""
