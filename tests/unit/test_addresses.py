"""Where the root listens."""

from __future__ import annotations

import pytest

from ddpwatch.collector import addresses
from ddpwatch.collector.addresses import endpoint, interfaces_here, listen_address, ports
from ddpwatch.errors import UsageError

HERE = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.5", "fd00::5"],
    "eth1": ["10.1.0.5"],
    "ib0": [],
}


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({"DDPWATCH_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth0"}, "10.1.0.5"),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1", "NCCL_SOCKET_IFNAME": "eth1"}, "10.0.0.5"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "10.0.0.5"),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, "10.1.0.5"),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, "10.0.0.5"),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, "10.0.0.5"),
        ({"NCCL_SOCKET_IFNAME": "^=docker0,eth0"}, "10.1.0.5"),
    ],
)
def test_an_interface_that_the_environment_names(environment: dict[str, str], address: str) -> None:
    assert listen_address({"MASTER_ADDR": "192.0.2.7", **environment}, HERE) == address


@pytest.mark.parametrize("name", ["eth", "ib0", "eth7"])
def test_an_interface_without_an_address_is_named_in_the_error(name: str) -> None:
    with pytest.raises(UsageError, match=f"DDPWATCH_IFNAME={name}: no such interface"):
        listen_address({"DDPWATCH_IFNAME": name}, HERE)


def test_the_route_to_the_master_decides_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"node0": "10.0.0.5", "127.0.0.1": "127.0.0.1", "debian": "127.0.1.1", "localhost": "127.0.0.1"}
    sources |= {"192.0.2.1": "10.1.0.5"}
    monkeypatch.setattr(addresses, "_source_address", sources.get)
    assert listen_address({"MASTER_ADDR": "node0"}, HERE) == "10.0.0.5"
    assert listen_address({"MASTER_ADDR": "127.0.0.1"}, HERE) == "127.0.0.1"
    assert listen_address({}, HERE) == "127.0.0.1"
    assert listen_address({"MASTER_ADDR": "debian"}, HERE) == "10.1.0.5"  # its own name leads to its loopback
    assert listen_address({"MASTER_ADDR": "unknown"}, HERE) == "10.1.0.5"


def test_this_machine_has_a_loopback() -> None:
    assert listen_address({"MASTER_ADDR": "127.0.0.1"}, interfaces_here()) == "127.0.0.1"
    assert any("127.0.0.1" in found for found in interfaces_here().values())


def test_ports() -> None:
    assert list(ports({"DDPWATCH_PORTS": "29600-29602"})) == [29600, 29601, 29602]
    assert list(ports({"DDPWATCH_PORTS": "29600"})) == [29600]
    assert list(ports({})) == [0]
    for text in ("0", "70000", "2-1", "x", "1-", "-1"):
        with pytest.raises(UsageError, match="not a range of ports"):
            ports({"DDPWATCH_PORTS": text})


def test_endpoints() -> None:
    assert endpoint("10.0.0.5", 29600) == "tcp://10.0.0.5:29600"
    assert endpoint("fd00::5", 0) == "tcp://[fd00::5]:*"
