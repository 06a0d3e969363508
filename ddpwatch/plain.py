"""The view without a dashboard: one aligned line every few seconds, for logs, pipes and dumb terminals."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence

from ddpwatch import rundir
from ddpwatch.analysis.render import number, percent, table
from ddpwatch.analysis.text import clean
from ddpwatch.messages import Bye, Message
from ddpwatch.rundir import RunInfo
from ddpwatch.sources import SILENCE_S, LiveSource, newest_run
from ddpwatch.state import RunState
from ddpwatch.transport import Envelope
from ddpwatch.analysis.verdict import verdict

EVERY_S = 2.0
_HEADER = f"{'step':>8}  {'it/s':>7}  {'step ms':>8}  {'overlap':>7}  {'exposed ms':>10}  {'late':>16}  verdict"
