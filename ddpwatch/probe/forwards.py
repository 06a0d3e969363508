"""Sees the forwards of one DDP module: by their calls, or by hooks where the interpreter does not show calls.

A module with hooks takes another way through torch: a traceback has one frame of torch's more, and a warning names
another line. So there are none where there need not be.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddpwatch.probe.autograd import is_compiling_frames
from ddpwatch.probe.calls import SeenCalls
from ddpwatch.probe.guard import Guard
from ddpwatch.probe.guarded import PortableHook


class SeenForwards:
    """The forwards of one module, seen until `close`.

    Args:
        ddp: The module.
        begin: Called at the start, with the module.
        synced: Called when the buffers' broadcast has ended, in a forward of which `expect_buffers` was called.
        end: Called at the end, with the module and, at last, the output.
        guard: Takes ddpwatch's errors.

    Attributes:
        awaits_buffers: Whether `synced` is still to come.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        begin: Callable[..., None],
        synced: Callable[[], None],
        end: Callable[..., None],
        guard: Guard,
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._synced = synced
        self._inner_hook = PortableHook(guard.run, "buffer waits", self._inner_begins)
        self._inner_handle: RemovableHandle | None = None
        self.awaits_buffers = False
        self._handles: list[RemovableHandle] = []
        self._seen: list[SeenCalls] = []
        if not self._see_calls(ddp, begin, end, guard):
            self._handles.append(ddp.register_forward_pre_hook(PortableHook(begin)))
            self._handles.append(ddp.register_forward_hook(PortableHook(end)))

    def _see_calls(
        self, ddp: DistributedDataParallel, begin: Callable[..., None], end: Callable[..., None], guard: Guard
    ) -> bool:
        # The first and the last of what `forward` calls, as do methods that subclasses have in its place
        methods = type(ddp)._pre_forward, type(ddp)._post_forward
        codes = [function.__code__ for function in methods if isinstance(function, FunctionType)]
        if len(codes) < 2 or any(code.co_varnames[:1] != ("self",) for code in codes) or "forward" in vars(ddp):
            return False
        of_this: dict[str, Any] = {"names": ["self"], "of": self._ddp}
        seen = SeenCalls([], code=codes[0], begin=begin, on_error=guard.failed, **of_this)
        if not seen.by_events:
            return False
        self._seen += [seen, SeenCalls([], code=codes[1], end=end, on_error=guard.failed, **of_this)]
        if len(ddp.modules_buffers) > 0:
            failed = partial(guard.failed, feature="buffer waits")
            self._seen.append(SeenCalls([], code=codes[0], end=self._pre_forward_ends, on_error=failed, **of_this))
        weakref.finalize(ddp, guard.run, "closing", self.close).atexit = False  # as hooks die with the module
        return True

    def close(self) -> None:
        """Sees nothing more."""
        self.forget_buffers()
        for handle in self._handles:
            handle.remove()
        for seen in self._seen:
            seen.close()
        self._handles.clear()
        self._seen.clear()

    def expect_buffers(self, ddp: DistributedDataParallel) -> None:
        """Expects buffers to be broadcast by the forward that has started.

        A hook on the module inside is for this forward alone, and what torch compiles must not meet it.
        """
        if not ddp.will_sync_module_buffers() or hasattr(ddp, "buffer_hook"):  # type: ignore[no-untyped-call]
            return
        if self._seen:
            self.awaits_buffers = True
            return
        inner = ddp.module
        unhookable = isinstance(inner, torch.jit.ScriptModule) or inner._compiled_call_impl is not None
        if not (unhookable or is_compiling_frames()):
            self._inner_handle = inner.register_forward_pre_hook(self._inner_hook, prepend=True)
            self.awaits_buffers = True

    def forget_buffers(self) -> None:
        """Forgets them as another forward starts: the one before has perhaps failed before it came so far."""
        self.awaits_buffers = False
        if self._inner_handle is not None:
            self._inner_handle.remove()
            self._inner_handle = None

    def _inner_begins(self, module: Any, arguments: Any) -> None:
        self.forget_buffers()
        self._synced()

    def _pre_forward_ends(self, module: Any, result: Any) -> None:
        if self.awaits_buffers:
            self.awaits_buffers = False
            self._synced()
