"""A sweep of all-reduces, as ``torchrun -m ddpwatch.whatif.sweep`` runs it."""

from __future__ import annotations

import sys

from ddpwatch.whatif.sweep import main

sys.exit(main())
