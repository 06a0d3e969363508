"""Removes names from a recording before it is shared: the same name always becomes the same word.

Every text is replaced unless it is one of a known few: phases, backends, versions of torch, types of devices, product
names of GPUs, DDP's flags, signals, and exceptions of Python and torch (the class of any other exception may reveal a
name). Times, sizes and layouts are kept.

The words are hashes. ``DDPWATCH_ANONYMIZE_KEY`` in the environment makes them keyed hashes: without the key, nobody can
test a guessed name against a word.
"""

from __future__ import annotations

import builtins
import hashlib
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from ddpwatch.run.blackbox import PHASES
from ddpwatch.sampling.stack_order import CUT_SHORT
from ddpwatch.wire.messages import (
    FEATURES,
    GPU,
    Beat,
    BucketLayout,
    BusyProcess,
    Bye,
    ClockExchange,
    Device,
    Group,
    Hello,
    Layout,
    Mark,
    Message,
    Node,
    SampledLine,
    Stack,
    StackSamples,
    Status,
    encode,
)
from ddpwatch.wire.transport import Envelope, Frame

_BACKEND = r"(?:(?:cpu|cuda|xpu|mps|hpu):)?(?:gloo|nccl|mpi|ucc|xccl|hccl)"
_BACKENDS = f"{_BACKEND}(?:,{_BACKEND})*"
_EXCEPTIONS = frozenset(
    name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
) | {
    "AcceleratorError", "DistBackendError", "DistError", "DistNetworkError", "DistStoreError", "OutOfMemoryError",
    "QueueEmptyError",
}  # fmt: skip
_FLAGS = frozenset(
    ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers", "bucket_cap_mb",
     "strategy", "parameter_groups", "reshard_after_forward")
)  # fmt: skip
_GROUPS = "data parallel|sharding|replication|all ranks|own|dp|tp|pp|ep|cp|shard|replicate"
_REFUSALS = frozenset(
    ("oversize", "invalid", "unknown type", "not msgpack", "multipart", "not a rank's to send", "foreign rank",
     "not a node's to send", "foreign node", "foreign clock", "not an agent's to send", "unknown key", "bad handshake",
     "replayed", "repeated")
)  # fmt: skip
_OBSTACLES = (
    r"\d+ calls of operators in a step are too many|its torch has no profiler|it does not train in its main thread|"
    "the job has a profiler of its own|torch's profiler has failed"
)
_SIGNALS = frozenset(number.name for number in signal.Signals)


def anonymized(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Yields the frames with every name replaced."""
    for message, envelope in frames:
        hidden = anonymous(message)
        frame = envelope.frame if hidden is message else encode(hidden)
        yield hidden, Envelope(envelope.seq, envelope.received_ns, frame)


def anonymous(message: Message) -> Message:
    """Returns the message with every name replaced."""
    rules = _RULES.get(type(message))
    if rules is None:
        return message
    return replace(message, **{field: hide(getattr(message, field)) for field, hide in rules.items()})


def word(kind: str, name: str) -> str:
    """Returns the word that replaces a name; "" for an empty name."""
    return f"{kind}-{_digest(name, os.environ.get('DDPWATCH_ANONYMIZE_KEY', ''))}" if name else ""


@lru_cache(maxsize=1 << 16)
def _digest(name: str, key: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=5, key=hashlib.sha256(key.encode()).digest()).hexdigest()


def _word(kind: str, known: str = "") -> Callable[[str], str]:
    """Replaces a text, unless all of it matches ``known``."""
    pattern = re.compile(known)
    return lambda text: text if pattern.fullmatch(text) else word(kind, text)


def _words(kind: str) -> Callable[[list[str]], list[str]]:
    return lambda names: [word(kind, name) for name in names]


def _flags(flags: dict[str, Any]) -> dict[str, Any]:
    return {
        name if name in _FLAGS else word("flag", name): word("flag", value) if isinstance(value, str) else value
        for name, value in flags.items()
    }


def _kinds(kinds: list[str]) -> list[str]:
    known = _word("kind", r"(?:b?float|complex|u?int)\d+(?:_[a-z0-9]+)? (?:cpu|cuda|xpu|mps|hpu)(?::\d+)?(?: sparse)?")
    return [known(kind) for kind in kinds]


def _buckets(buckets: list[BucketLayout]) -> list[BucketLayout]:
    return [replace(bucket, name=word("param", bucket.name)) for bucket in buckets]


def _refused(counts: dict[str, int]) -> dict[str, int]:
    return {reason if reason in _REFUSALS else word("reason", reason): count for reason, count in counts.items()}


def _detail(detail: str) -> str:
    """Returns a signal, or the type of an exception; the text of an exception may say anything."""
    if detail in _SIGNALS or detail.isdecimal():
        return detail
    found = re.match(r"(?:[\w.]*\.)?(\w+)(?::|$)", detail)
    if found is None:
        return "hidden" if detail else ""
    return found[1] if found[1] in _EXCEPTIONS else word("error", found[1])


def _stack(text: str) -> str:
    """Keeps of each call only the line, and leaves out what is no call."""
    found = re.findall(r'^  File "(.*)", line (\d+) in (.+)$', text, re.MULTILINE)
    calls = ((word("path", file), line, word("call", name)) for file, line, name in found)
    return "\n".join(f'  File "{file}", line {line} in {name}' for file, line, name in calls)


def _lines(lines: list[SampledLine]) -> list[SampledLine]:
    return [
        replace(
            line,
            phase=_PHASE(line.phase),
            module=word("param", line.module),
            file=word("path", line.file),
            function=word("call", line.function),
            inner=word("call", line.inner),
        )
        for line in lines
    ]


def _processes(busy: list[BusyProcess]) -> list[BusyProcess]:
    return [BusyProcess(0, word("process", process.name), process.cpu) for process in busy]


_PHASE = _word("phase", "|".join((*PHASES, GPU)))
_PRODUCT = _word("device", r"(?:NVIDIA|Tesla|GeForce|Quadro|GRID|AMD|Intel)[A-Za-z0-9 .()+-]{1,60}|\d+ CPUs")
_RULES: dict[type[Message], dict[str, Callable[[Any], Any]]] = {
    Hello: {
        "run_id": _word("run"),
        "previous": _word("run"),
        "host": _word("host"),
        "pid": lambda _: 0,
        "boot_id": _word("boot"),
        "time_ns": _word("clock"),
        "pid_ns": _word("processes"),
        "device_kind": _word("device", "cpu|cuda|xpu|mps|hpu"),
        "device_name": _PRODUCT,
        "device_uuid": _word("device"),
        "backend": _word("backend", _BACKENDS),
        "torch": _word("torch", r"\d+(?:\.\d+)+(?:a\d+|b\d+|rc\d+)?(?:\.dev\d+)?(?:\+(?:cpu|cu\d+|rocm[\d.]+|xpu))?"),
        "module": _word("model"),
        "timing_source": _word("source", r"(?:host|cuda events)(?: \(launch only\))?"),
        "script": _word("path"),
        "ddp": _flags,
    },
    Group: {"name": _word("group"), "kind": _word("kind", _GROUPS), "backend": _word("backend", _BACKENDS)},
    Layout: {
        "module_name": _word("model"),
        "comm_hook": _word("hook", r"(?:allreduce|(?:fp16|bf16)_compress|(?:batched_)?powerSGD|noop)_hook"),
        "params": _words("param"),
        "param_kind": _kinds,
        "buckets": _buckets,
    },
    Beat: {"phase": _PHASE, "activity": _word("activity", "data|save|compile|validation|graph")},
    Stack: {"text": _stack},
    StackSamples: {
        "lines": _lines,
        "trace": lambda trace: b"",
        "obstacle": _word("obstacle", _OBSTACLES),
        "cut_short": _word("reason", "|".join(CUT_SHORT)),
    },
    Mark: {"name": _word("mark"), "off": _word("feature", "|".join(FEATURES))},
    Device: {
        "host": _word("host"),
        "boot_id": _word("boot"),
        "uuid": _word("device"),
        "name": _PRODUCT,
        "net_faulty": _word("interface", r"(?:eth|ib|bond)\d{1,3}|lo"),
        "busy": _processes,
    },
    ClockExchange: {
        "node_boot_id": _word("boot"),
        "node_time_ns": _word("clock"),
        "root_boot_id": _word("boot"),
        "root_time_ns": _word("clock"),
    },
    Node: {"host": _word("host")},
    Bye: {"detail": _detail, "phase": _PHASE},
    Status: {
        "refused": _refused,
        "recording": _word("path"),
        "recording_error": lambda error: "hidden" if error else "",
        "whole": _word("command"),
    },
}
