"""Recordings for other tools: tables, traces, raw frames."""
