"""Pure functions over messages: intervals, steps, ranks, buckets, report. Knows no clock, socket or screen."""
