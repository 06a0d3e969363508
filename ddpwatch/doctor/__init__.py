"""``ddpwatch doctor``: what works here, what is missing, and what to do about it."""
