"""Finding the layers that match a pattern."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from trainer.errors import TrainerError

SHOWN = 8


def matching_layers(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Return the layers whose name matches ``pattern``, in the order of the model.

    A plain name matches that module, container or not. A pattern with wildcards matches only layers that own
    parameters, so that ``*`` does not match a layer again through each container around it.

    Raises:
        TrainerError: Nothing matches.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if name == pattern or (fnmatchcase(name, pattern) and owns_parameters(module))
    ]
    if not found:
        known = [name or "(the model itself)" for name, module in model.named_modules() if owns_parameters(module)]
        some = ", ".join(known[:SHOWN]) + (f" and {len(known) - SHOWN} more" if len(known) > SHOWN else "")
        raise TrainerError(f"no layer matches {pattern!r}; there are {some}")
    return found


def owns_parameters(module: nn.Module) -> bool:
    """Whether this is a layer, not a container of layers."""
    return next(module.parameters(recurse=False), None) is not None
