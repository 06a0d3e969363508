"""Where the root listens: at one address that the job's own traffic uses, never at all of them."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

import psutil

from ddpwatch.errors import UsageError

ANYWHERE = "192.0.2.1"  # for documentation (RFC 5737): only its route is looked up, nothing is sent
Interfaces = Mapping[str, Sequence[str]]  # the addresses of each interface


class AddressSearch:
    """Looks for the address to listen at on a thread of its own: a name server may take its time."""

    def __init__(self) -> None:
        self._found: Future[str] = Future()
        threading.Thread(target=self._search, name="ddpwatch-address", daemon=True).start()

    def address(self) -> str | None:
        """Returns the address; None while it is not known. Never waits.

        Raises:
            UsageError: As `listen_address`.
        """
        return self._found.result() if self._found.done() else None

    def _search(self) -> None:
        try:
            self._found.set_result(listen_address(os.environ, interfaces_here()))
        except Exception as error:
            self._found.set_exception(error)


def listen_address(environment: Mapping[str, str], interfaces: Interfaces) -> str:
    """Returns the address of the interface that the environment names, else the one on the route to MASTER_ADDR.

    Raises:
        UsageError: The interface is not there, or has no address.
    """
    for name in ("DDPWATCH_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if spec := environment.get(name, ""):
            prefixes = name == "NCCL_SOCKET_IFNAME"
            if (address := _of_interface(spec, interfaces, prefixes)) is not None:
                return address
            hint = f"set DDPWATCH_IFNAME to one of {', '.join(sorted(interfaces))}"
            raise UsageError(f"{name}={spec}: no such interface with an address", hint)
    return _on_route(environment.get("MASTER_ADDR", "localhost"))


def ports(environment: Mapping[str, str]) -> Iterable[int]:
    """Returns the ports to try, by DDPWATCH_PORTS; 0 lets the kernel choose.

    Raises:
        UsageError: It is not a range of ports.
    """
    text = environment.get("DDPWATCH_PORTS", "")
    if not text:
        return (0,)
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < first <= last < 1 << 16:
        raise UsageError(f"DDPWATCH_PORTS={text} is not a range of ports", "write it as 29600-29699")
    return range(first, last + 1)


def endpoint(address: str, port: int) -> str:
    """Returns it as ZeroMQ writes it."""
    host = f"[{address}]" if ":" in address else address
    return f"tcp://{host}:{port or '*'}"


def interfaces_here() -> Interfaces:
    """Returns the addresses of this host's interfaces, IPv4 first, without those that mean something on one link."""
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        by_family = {family: [a.address for a in addresses if a.family == family] for family in socket.AddressFamily}
        usable = [*by_family[socket.AF_INET], *by_family[socket.AF_INET6]]
        found[name] = [address for address in usable if "%" not in address]
    return found


def _of_interface(spec: str, interfaces: Interfaces, prefixes: bool) -> str | None:
    """Reads names for Gloo, prefixes for NCCL; ``=`` in front makes them names, and ``^`` excludes them."""
    excluded = prefixes and spec.startswith("^")
    exact = not prefixes or spec.lstrip("^").startswith("=")
    wanted = tuple(word.strip() for word in spec.lstrip("^=").split(",") if word.strip())
    for name, addresses in interfaces.items():
        is_named = name in wanted if exact else name.startswith(wanted)
        if addresses and is_named != excluded and not (excluded and ipaddress.ip_address(addresses[0]).is_loopback):
            return addresses[0]
    return None


def _on_route(master: str) -> str:
    """Returns this host's address on the route to a host.

    Where a host's own name leads to its loopback (as in Debian's /etc/hosts), the address on the default route.
    """
    address = _source_address(master)
    if address is None or (ipaddress.ip_address(address).is_loopback and not _means_loopback(master)):
        return _source_address(ANYWHERE) or "127.0.0.1"
    return address


def _means_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _source_address(host: str) -> str | None:
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None
