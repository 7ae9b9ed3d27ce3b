"""The interface that has a host's address."""

from types import SimpleNamespace

import pytest

from pipelinerl.world import network


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
