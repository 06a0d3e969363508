"""Arithmetic and text that all rooms share."""
