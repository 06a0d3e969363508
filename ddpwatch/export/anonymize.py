"""Names taken out of a recording before it is shared: the same name always becomes the same word.

Replaced are the hosts, run ids, scripts, models, parameters, marks, devices' ids, paths and the text of errors. Kept
are times, sizes, layouts, versions, device types and exception types.

The words are hashes. With ``DDPWATCH_ANONYMIZE_KEY`` in the environment they are keyed, and nobody without the key can
test whether a name that he guesses is the one behind a word.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from msgspec.structs import replace

from ddpwatch.messages import Bye, Device, Hello, Layout, Mark, Message, Status, encode
from ddpwatch.transport import Envelope

_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]{0,80}(?:Error|Exception|Interrupt|Exit|Warning))\b")
_SIGNAL = re.compile(r"^SIG[A-Z0-9+]{1,12}$")


def anonymized(frames: Iterable[tuple[Message, Envelope]]) -> Iterator[tuple[Message, Envelope]]:
    """The frames with every name replaced."""
    for message, envelope in frames:
        hidden = anonymous(message)
        frame = envelope.frame if hidden is message else encode(hidden)
        yield hidden, Envelope(envelope.seq, envelope.received_ns, frame)


def anonymous(message: Message) -> Message:
    """The message with every name replaced."""
    if isinstance(message, Hello):
        return _hello(message)
    if isinstance(message, Layout):
        params = [word("param", name) for name in message.params]
        return replace(message, module_name=word("model", message.module_name), params=params)
    if isinstance(message, Mark):
        return replace(message, name=word("mark", message.name))
    if isinstance(message, Device):
        return replace(message, host=word("host", message.host), uuid=word("device", message.uuid))
    if isinstance(message, Bye):
        return replace(message, detail=_detail(message.detail))
    if isinstance(message, Status):
        error = "hidden" if message.recording_error else ""
        return replace(message, recording=word("path", message.recording), recording_error=error)
    return message


def word(kind: str, name: str) -> str:
    """What stands for a name; nothing for nothing."""
    return f"{kind}-{_digest(name, os.environ.get('DDPWATCH_ANONYMIZE_KEY', ''))}" if name else ""


@lru_cache(maxsize=1 << 16)
def _digest(name: str, key: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=5, key=hashlib.sha256(key.encode()).digest()).hexdigest()


def _hello(hello: Hello) -> Hello:
    flags = {name: word("flag", value) if isinstance(value, str) else value for name, value in hello.ddp.items()}
    return replace(
        hello,
        run_id=word("run", hello.run_id),
        host=word("host", hello.host),
        pid=0,
        boot_id=word("boot", hello.boot_id),
        device_uuid=word("device", hello.device_uuid),
        module=word("model", hello.module),
        script=word("path", hello.script),
        ddp=flags,
    )


def _detail(detail: str) -> str:
    """The type of an exception or the name of a signal; its text may say anything."""
    if _SIGNAL.match(detail):
        return detail
    found = _EXCEPTION.match(detail)
    return found[1] if found else ("hidden" if detail else "")
