"""How the probe hooks into a backward, on the forward's outputs and at the end of the graph; and torch.compile."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
import wrapt
from torch.autograd import Variable

on_graph_end = Variable._execution_engine.queue_callback  # only from within a backward


def add_gradient_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> None:
    """Does as `tensor.register_hook`, without the handle that removes the hook: two thirds of its time."""
    add = getattr(tensor.grad_fn, "_register_hook_dict", None)
    if add is None or type(tensor) is not torch.Tensor or tensor._backward_hooks is not None:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return
    # Among a tensor's hooks; handles count from 0
    tensor._backward_hooks = OrderedDict({-1: hook})  # a later hook of the user's goes there, too
    add(tensor)


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a forward's output, however nested, also in objects of any class (their attributes)."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    left, seen = [output], set[int]()
    while left and len(seen) < 10_000:  # objects in one output
        item = left.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            left += reversed(list(_values(item)))


def _values(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, (list, tuple)):
        return item
    if hasattr(item, "__dataclass_fields__"):
        return [getattr(item, name, None) for name in item.__dataclass_fields__]  # a field may be unset
    if isinstance(item, (torch.nn.Module, ModuleType, type)):
        return ()
    attributes = getattr(item, "__dict__", ())
    return attributes.values() if isinstance(attributes, dict) else ()


def is_compiling_frames() -> bool:
    """Returns whether torch.compile looks at the frames that are called from here. True if that cannot be found out."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return callback is None or callback() not in (None, False)


def optimizer_hook(call: Callable[[Any], object]) -> Callable[..., None]:
    """Returns a hook of optimizers that torch.compile looks into, unlike other code of ddpwatch's: it finds it empty.

    At one that it leaves alone it would break the optimizer's graph, or fail where there must be only one.

    Args:
        call: Takes the optimizer.
    """

    def hook(optimizer: Any, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            call(optimizer)

    hook.__code__ = hook.__code__.replace(co_filename="<optimizer hook>")  # by which others know ddpwatch's code
    return hook


def _leave_untraced(trace_rules: Any) -> None:
    """Makes torch.compile run the hooks as they are, at a graph break. DDP's own forward has several anyway."""
    if hasattr(trace_rules, "add"):
        trace_rules.add("ddpwatch")


wrapt.register_post_import_hook(_leave_untraced, "torch._dynamo.trace_rules")
