"""Unpacks what zstd has packed."""

from __future__ import annotations

import threading

import zstandard


class _ThreadLocal(threading.local):
    """One decompressor per thread: it must not be shared, and making one takes longer than unpacking a node's step."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_local = _ThreadLocal()


def unpacked(packed: bytes, max_output_size: int = 0) -> bytes:
    """Unpacks one frame; ``max_output_size`` is needed where it does not say how long its content is.

    Raises:
        ZstdError: It is damaged, or longer.
    """
    return _local.decompressor.decompress(packed, max_output_size=max_output_size)
