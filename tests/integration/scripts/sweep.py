"""A sweep of all-reduces, as ``torchrun -m ddpwatch.sweep`` runs it."""

from __future__ import annotations

import sys

from ddpwatch.sweep import main

sys.exit(main())
