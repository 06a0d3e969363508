"""Processes that multiprocessing starts, and that end in each way: each prints its goodbye."""

import multiprocessing
import sys

from ddpwatch.probe.session import ProbeSession


def child(method: str, how: str) -> None:
    session = ProbeSession()

    def close(*_: object) -> None:
        bye = session._goodbye()
        print(method, how, bye.reason, bye.detail, sep="|", flush=True)

    session.close = close  # type: ignore[method-assign]
    try:
        raise KeyError("handled")
    except KeyError:
        import traceback

        traceback.print_exc()
    if how == "raises":
        raise ValueError("boom")
    if how == "exits":
        sys.exit(3)


if __name__ == "__main__":
    children = [
        multiprocessing.get_context(method).Process(target=child, args=(method, how))
        for method in ("fork", "spawn")
        for how in ("returns", "raises", "exits")
    ]
    for one in children:
        one.start()
    for one in children:
        one.join()
