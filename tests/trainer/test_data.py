"""Data: real, split, sharded, resumable."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.trainer.conftest import ALONE
from trainer.data import build_data
from trainer.data.stream import Batch, BatchStream
from trainer.distributed import World
from trainer.errors import TrainerError


def take(stream: BatchStream, count: int) -> list[Batch]:
    return list(islice(iter(stream), count))


def test_digits_are_1797_real_images() -> None:
    data = build_data("digits")
    images = [image for split in (data.train, data.test) for image, _ in split]  # type: ignore[union-attr]
    labels = torch.stack([label for split in (data.train, data.test) for _, label in split])  # type: ignore[union-attr]
    assert len(images) == 1797
    assert all(image.shape == (1, 8, 8) for image in images)
    assert 0 == min(image.min() for image in images) < max(image.max() for image in images) == 1
    assert labels.bincount().min() > 170


def test_text_of_a_directory_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"world" * 10)
    (tmp_path / "a.txt").write_bytes(b"hello" * 10)
    data = build_data("text:block_size=4", tmp_path)
    window, target = data.train[0]
    assert bytes(window.tolist()) == b"hell"
    assert bytes(target.tolist()) == b"ello"


def test_text_too_short(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"hello")
    with pytest.raises(TrainerError, match="has 5 bytes, too few for windows of 64"):
        build_data("text", tmp_path)


@pytest.mark.parametrize("kind", ["vector", "image", "bytes"])
def test_synthetic_is_the_same_every_time(kind: str) -> None:
    one, other = (build_data(f"synthetic:kind={kind},samples=8") for _ in range(2))
    assert torch.equal(one.train[3][0], other.train[3][0])
    assert one.train[3][0].shape == one.shape


def test_ranks_together_see_what_one_process_sees() -> None:
    data = build_data("digits").train
    whole = take(BatchStream(data, 12, ALONE, seed=1), 5)
    worlds = [World(rank, rank, 3, torch.device("cpu")) for rank in range(3)]
    parts = [take(BatchStream(data, 4, world, seed=1), 5) for world in worlds]
    for batch, shares in zip(whole, zip(*parts, strict=True), strict=True):
        together = torch.cat([images for images, _ in shares])
        assert torch.equal(batch[0].sum(0), together.sum(0))


@pytest.mark.parametrize("after", [0, 3, 44, 45, 60])
def test_stream_goes_on_where_it_was(after: int) -> None:
    data = build_data("digits").train  # 44 batches of 32 per epoch
    stream = BatchStream(data, 32, ALONE, seed=0)
    iterator = iter(stream)
    for _ in range(after):
        next(iterator)
    again = BatchStream(data, 32, ALONE, seed=0)
    again.load_state_dict(stream.state_dict())
    for expected, batch in zip(islice(iterator, 3), take(again, 3), strict=True):
        assert torch.equal(expected[0], batch[0])
