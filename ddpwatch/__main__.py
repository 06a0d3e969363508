"""``python -m ddpwatch``: the command line, where the ``ddpwatch`` script is not on the PATH."""

from ddpwatch.cli import main

main()
