"""Where ranks run: on which host, and on which of its GPUs, by what they said when they introduced themselves."""

from __future__ import annotations

from typing import NamedTuple

from ddpwatch.wire.messages import Hello


class Host(NamedTuple):
    """A host. Its name alone does not identify it: containers and clones often share one."""

    name: str
    boot_id: str = ""


class Gpu(NamedTuple):
    """A GPU of a host."""

    host: Host
    uuid: str


class Placement:
    """Knows where each rank runs.

    Attributes:
        hosts: By rank.
        gpus: By rank; none of a rank without one.
    """

    def __init__(self) -> None:
        self.hosts: dict[int, Host] = {}
        self.gpus: dict[int, Gpu] = {}

    def add_hello(self, hello: Hello) -> None:
        """Takes a rank's introduction; a newer one counts."""
        host = self.hosts[hello.rank] = Host(hello.host, hello.boot_id)
        self.gpus.pop(hello.rank, None)
        if hello.device_uuid:
            self.gpus[hello.rank] = Gpu(host, hello.device_uuid)
