"""The interface that has a host's address."""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from pipelinerl.world import network


@pytest.fixture(autouse=True)
def nothing_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_looked_up", {})


@pytest.fixture
def interfaces(monkeypatch):
    entries = {
        "lo": [SimpleNamespace(address="127.0.0.1")],
        "eth0": [SimpleNamespace(address="00:11:22:33:44:55"), SimpleNamespace(address="10.9.0.7")],
        "ib0": [SimpleNamespace(address="fd00::7%ib0")],
    }
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: entries)


@pytest.mark.parametrize(
    ("host", "name"), [("10.9.0.7", "eth0"), ("fd00::7", "ib0"), ("127.0.0.1", "lo"), ("10.9.0.8", None)]
)
def test_interface_is_found_by_its_address(interfaces, host, name):
    assert network.interface_of(host) == name


def test_unknown_name_has_no_interface(interfaces, monkeypatch):
    def unknown(*_):
        raise OSError("no such host")

    monkeypatch.setattr(network.socket, "getaddrinfo", unknown)
    assert network.interface_of("nowhere") is None


def test_names_are_looked_up_at_the_same_time_and_once_each(interfaces, monkeypatch):
    """As in a dry run of many nodes: a name that nobody knows takes seconds, and each node has several roles."""
    asked, all_wait = Counter(), threading.Barrier(16)

    def slow(hostname: str, *_):
        asked[hostname] += 1
        all_wait.wait(60)
        if hostname == "host3":
            return [(0, 0, 0, "", ("10.9.0.7", 0))]
        raise OSError("no such host")

    monkeypatch.setattr(network.socket, "getaddrinfo", slow)
    hosts = [f"host{number}" for number in range(16)]
    network.look_up(hosts * 4)
    assert [host for host in hosts * 4 if network.interface_of(host)] == ["host3"] * 4
    assert [host for host in hosts if network.listen_address(host)] == ["host3"]
    assert asked == dict.fromkeys(hosts, 1)


def test_name_that_is_unknown_at_first_is_looked_up_again(interfaces, monkeypatch):
    """A pod's name may be published after its role has started."""
    answers = iter([[], [(0, 0, 0, "", ("10.9.0.7", 0))]])

    def later(*_):
        if answer := next(answers):
            return answer
        raise OSError("no such host")

    monkeypatch.setattr(network.socket, "getaddrinfo", later)
    assert [network.listen_address("pod") for _ in range(3)] == ["", "10.9.0.7", "10.9.0.7"]
