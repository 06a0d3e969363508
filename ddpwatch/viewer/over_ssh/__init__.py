"""A live run on another host, watched through ssh: ``ddpwatch attach ssh://user@node/run``.

The viewer runs ``ssh user@node ddpwatch _stdio run`` and is a subscriber at the other end of its pipes: requests go up,
what the collector publishes comes down. Nothing listens, and ssh alone decides who may connect.
"""
