"""A run's figures for monitoring systems: scraped by Prometheus, or pushed to an OpenTelemetry collector.

`figures` says what is exported, `prometheus` and `otlp` how, and `follow` feeds both from a live run.
"""
