"""The notation ``name:key=value``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import spec
from trainer.errors import TrainerError


def thing(context: str, *, size: int = 1, rate: float | None = None, label: str = "") -> tuple[object, ...]:
    return context, size, rate, label


REGISTRY = {"thing": thing, "other": thing}


def build(text: str) -> tuple[object, ...]:
    return spec.build("gadget", text, REGISTRY, "context")


@given(st.integers(), st.floats(allow_nan=False), st.text(st.characters(blacklist_characters=",")))
def test_values_are_read_by_their_annotations(size: int, rate: float, label: str) -> None:
    assert build(f"thing:size={size},rate={rate!r},label={label}") == ("context", size, rate, label)


def test_defaults_stay() -> None:
    assert build("thing") == ("context", 1, None, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no gadget is called 'nothing'; known: thing, other"),
        ("thing:width=1", "gadget thing has no option 'width'; known: size, rate, label"),
        ("thing:size", "gadget thing: option 'size' needs a value, as in size=1"),
        ("thing:size=big", "gadget thing: size='big' is not a whole number"),
        ("thing:rate=fast", "gadget thing: rate='fast' is not a number"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(TrainerError) as caught:
        build(text)
    assert str(caught.value) == message


def test_help_lists_options() -> None:
    assert spec.describe({"thing": thing}) == "thing:size=,rate=,label="
