"""``name:key=value,key=value``: one notation for models, data, module hooks and faults.

The options of a name are the keyword-only parameters of its factory, with their annotations as types.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from trainer.errors import TrainerError

T = TypeVar("T")


def build(kind: str, spec: str, registry: Mapping[str, Callable[..., T]], *context: object) -> T:
    """Call the factory that ``spec`` names.

    Args:
        kind: What the name is of, for the error message.
        spec: ``name`` or ``name:key=value,...``.
        registry: The factories by name.
        *context: Positional arguments that every factory of this registry takes.

    Raises:
        TrainerError: No such name, no such option, or a value that cannot be read.
    """
    name, _, options = spec.partition(":")
    if name not in registry:
        raise TrainerError(f"no {kind} is called {name!r}; known: {', '.join(registry)}")
    factory = registry[name]
    return factory(*context, **_read_options(f"{kind} {name}", options, option_types(factory)))


def option_types(factory: Callable[..., object]) -> dict[str, Any]:
    """Return the keyword-only parameters of ``factory`` with their types."""
    function = factory.func if isinstance(factory, partial) else factory
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    parameters = inspect.signature(factory).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}


def describe(registry: Mapping[str, Callable[..., object]]) -> str:
    """List every name with its options, for ``--help``."""
    return "; ".join(_describe_one(name, option_types(factory)) for name, factory in registry.items())


def _describe_one(name: str, options: Iterable[str]) -> str:
    listed = ",".join(f"{option}=" for option in options)
    return f"{name}:{listed}" if listed else name


def _read_options(owner: str, text: str, known: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if key not in known:
            raise TrainerError(f"{owner} has no option {key!r}; known: {', '.join(known) or 'none'}")
        if not equals:
            raise TrainerError(f"{owner}: option {key!r} needs a value, as in {key}=1")
        options[key] = _read_value(f"{owner}: {key}", value, known[key])
    return options


def _read_value(owner: str, text: str, annotation: Any) -> Any:
    """Convert ``text`` to the first type of ``annotation`` (``int | None`` reads as int)."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    wanted = get_args(annotation)[0] if is_union else annotation
    try:
        return wanted(text)
    except ValueError as error:
        raise TrainerError(f"{owner}={text!r} is not {_named(wanted)}") from error


def _named(wanted: type) -> str:
    return {int: "a whole number", float: "a number"}.get(wanted, wanted.__name__)
