"""An endpoint for Prometheus, with its own client library (an optional extra)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ddpwatch.errors import UsageError
from ddpwatch.metrics.figures import INSTALL, METRICS, Board, Metric, Sample

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

DEFAULT_LISTEN = "127.0.0.1:9464"


def parse_listen(text: str) -> tuple[str, int]:
    """Splits ``HOST:PORT`` into host and port; ``:PORT`` is loopback.

    Raises:
        UsageError: It is something else.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is not an address to listen on", f"give HOST:PORT, such as {DEFAULT_LISTEN}")
    return host.strip("[]") or "127.0.0.1", int(port)


class RunCollector:
    """What the client library asks for values at each scrape."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Family]:
        """Yields the families that have values now."""
        values = self._board.values
        for metric in METRICS:
            if samples := values.get(metric.name):
                yield _family(metric, samples)


def _family(metric: Metric, samples: Sequence[Sample]) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.counter else GaugeMetricFamily
    family = kind(f"ddpwatch_{metric.name}", metric.help, labels=metric.labels, unit=metric.unit)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


@contextmanager
def listening(board: Board, listen: str) -> Iterator[str]:
    """Serves the board's values; gives the URL.

    Raises:
        UsageError: The library is not installed, or the address cannot be listened on.
    """
    host, port = parse_listen(listen)
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise UsageError("the library prometheus-client is not installed", INSTALL) from None
    registry = CollectorRegistry()
    registry.register(RunCollector(board))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(f"cannot listen on {listen}: {error.strerror or error}", "give --listen HOST:PORT") from None
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
