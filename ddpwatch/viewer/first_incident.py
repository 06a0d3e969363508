"""``DDPWATCH_EXPLAIN=first-incident``: asks a run once why a rank is late, as soon as one is.

``python -m ddpwatch.viewer.first_incident RUN``: the run's collector starts it. The samples are frames like any other,
so that recordings have them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.run import rundir
from ddpwatch.sampling.stack_order import StackOrder
from ddpwatch.viewer.explain import StackRequest, request_of
from ddpwatch.viewer.follow import LOOK_S, follow_run
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.viewer.state import RunState


class FirstIncident:
    """Looks at a run until a rank is late, and asks then.

    Args:
        order_stacks: Passes the order on.
        clock: A monotonic clock in seconds.

    Attributes:
        is_over: There is nothing more to do: the answer has come, or none will.
    """

    def __init__(
        self, order_stacks: Callable[[StackOrder], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_over = False
        self._order_stacks = order_stacks
        self._clock = clock
        self._request: StackRequest | None = None

    def look(self, state: RunState) -> None:
        """Looks at the run."""
        if self._request is not None:
            self.is_over = self._request.is_over(state)
            return
        try:
            self._request = request_of(state, None, clock=self._clock)
        except UsageError:  # no rank is late
            return
        self._order_stacks(self._request.order)


def main() -> None:
    """Follows the run that the command line names, until it is explained or over."""
    endpoint = rundir.endpoints(sys.argv[1])[1]
    try:
        source = LiveSource(endpoint)
        first = FirstIncident(source.order_stacks)
        follow_run(source, endpoint, first.look, lambda: not first.is_over, first_look_s=LOOK_S)
    except DdpwatchError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
