"""Pushes to an OpenTelemetry collector, with OpenTelemetry's own SDK (an optional extra).

Its environment variables count: ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_RESOURCE_ATTRIBUTES``, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ddpwatch.errors import UsageError
from ddpwatch.metrics.figures import INSTALL, METRICS, Board, Metric
from ddpwatch.version import __version__

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

TIMEOUT_S = 5.0
_UNITS = {"seconds": "s", "ratio": "1", "bytes": "By", "bytes_per_second": "By/s", "per_second": "1/s", "": "1"}


def metrics_url(text: str) -> str:
    """Returns the URL that metrics are posted to; one without a path gets OTLP's own.

    Raises:
        UsageError: It is no URL.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{text!r} is not a collector's URL", "give e.g. --otlp http://127.0.0.1:4318")
    return text if parts.path.strip("/") else text.rstrip("/") + "/v1/metrics"


@contextmanager
def pushing(board: Board, url: str, every_ms: float = 10_000) -> Iterator[str]:
    """Pushes the board's values every few seconds, and at the end; gives the URL.

    Raises:
        UsageError: The SDK is not installed, or the URL is none.
    """
    target = metrics_url(url)
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
    except ImportError:
        raise UsageError("OpenTelemetry's SDK is not installed", INSTALL) from None
    exporter = OTLPMetricExporter(endpoint=target, timeout=TIMEOUT_S)
    reader = PeriodicExportingMetricReader(exporter, every_ms, export_timeout_millis=1000 * TIMEOUT_S)
    resource = Resource.create({"service.name": "ddpwatch", "service.version": __version__})
    provider = MeterProvider([reader], resource, shutdown_on_exit=False)
    meter = provider.get_meter("ddpwatch", __version__)
    for metric in METRICS:
        _observe(meter, metric, board)
    try:
        yield target
    finally:
        provider.shutdown()


def _observe(meter: Meter, metric: Metric, board: Board) -> None:
    """Has the SDK ask for a metric's values; each names the run."""
    create: Callable[..., Any] = meter.create_observable_counter if metric.counter else meter.create_observable_gauge

    def values(_: CallbackOptions) -> Iterator[Observation]:
        from opentelemetry.metrics import Observation

        for labels, value in board.values.get(metric.name, ()):
            yield Observation(value, {"run": board.run_id, **dict(zip(metric.labels, labels, strict=True))})

    create(f"ddpwatch.{metric.name}", [values], _UNITS[metric.unit], metric.help)
