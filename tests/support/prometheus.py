"""Scrapes a metrics endpoint, and asks Prometheus's own tools where they are installed."""

from __future__ import annotations

import shutil
import subprocess
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
Scrape = dict[str, dict[tuple[str, ...], float]]  # by the samples' name, then by the labels' values, sorted by label


def needs(tool: str) -> str:
    """The path of one of Prometheus's tools; without it, the test is skipped."""
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"needs {tool} on PATH (Debian's package prometheus)")
    return found


def get(url: str, accept: str = "*/*") -> str:
    """What an endpoint answers."""
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def scrape(url: str) -> Scrape:
    """The samples of an endpoint, as OpenMetrics."""
    found: Scrape = {}
    for family in text_string_to_metric_families(get(url, OPEN_METRICS)):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def check_with_promtool(url: str) -> None:
    """`promtool check metrics` neither fails nor complains."""
    command = [needs("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=get(url), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
