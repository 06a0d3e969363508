"""A worker of pytest-xdist in a forked process: runs the program that follows ``-c``, as Python would."""

import sys

exec(sys.argv[-1])
