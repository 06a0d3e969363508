"""Real text as bytes: the standard library's own sources, or any file or directory."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

from trainer.data.source import DataSource, Sample
from trainer.errors import TrainerError

TEST_SHARE = 0.05


class TextBytes(Dataset[Sample]):
    """Consecutive windows of a text, each with its successor bytes as the target."""

    def __init__(self, text: bytes, block_size: int) -> None:
        """Cut ``text`` into windows of ``block_size`` bytes; a shorter rest is left out."""
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.block_size = block_size

    def __len__(self) -> int:
        """The number of complete windows."""
        return (len(self.tokens) - 1) // self.block_size

    def __getitem__(self, index: int) -> Sample:
        """Return the window and the same window one byte later, both ``(block_size,)`` int64."""
        start = index * self.block_size
        window = self.tokens[start : start + self.block_size + 1].long()
        return window[:-1], window[1:]


def text(path: Path | None = None, *, block_size: int = 64, max_kib: int = 4096) -> DataSource:
    """Cut a text into windows; its last twentieth is kept for testing.

    Args:
        path: A file, a directory, or None for the standard library's sources.
        block_size: Bytes per window.
        max_kib: Read no more than this.

    Raises:
        TrainerError: The text cannot be read, or is shorter than two windows.
    """
    content = read_text(path, max_kib << 10)
    tail = max(block_size + 1, int(len(content) * TEST_SHARE))
    if len(content) - tail <= block_size:
        raise TrainerError(f"the text has {len(content)} bytes, too few for windows of {block_size}")
    train, test = TextBytes(content[:-tail], block_size), TextBytes(content[-tail:], block_size)
    return DataSource(train, test, "bytes", (block_size,), classes=256)


def read_text(path: Path | None, max_bytes: int) -> bytes:
    """Read at most ``max_bytes`` of text, in an order that is the same on every rank."""
    content = bytearray()
    try:
        for file in _files(path):
            with file.open("rb") as stream:
                content += stream.read(max_bytes - len(content))
            if len(content) >= max_bytes:
                break
    except OSError as error:
        raise TrainerError(f"cannot read text from {error.filename}: {error.strerror}") from error
    return bytes(content)


def _files(path: Path | None) -> Iterator[Path]:
    """List the files to read; the top level of the standard library is text enough."""
    if path is None:
        yield from sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    elif path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.is_file())
    else:
        yield path
