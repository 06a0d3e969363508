"""Checks the machines that a job is about to run on: a job of its own, which finds slow ranks, nodes and links."""
