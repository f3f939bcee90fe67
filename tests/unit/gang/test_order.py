"""What is ordered of a host."""

import json
from pathlib import Path

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.gang.network import listen, network_environ
from phalanx.gang.order import GangOrder, Rendezvous

OTHER = Rendezvous("10.0.0.1", 4000)


def test_order_of_a_part_of_the_world_survives_json():
    order = GangOrder(8, "m:f", Path("/logs"), {"a": [1]}, ranks=(4, 5), rendezvous=OTHER, address="10.0.0.2")
    assert GangOrder.from_json(json.loads(json.dumps(order.to_json()))) == order
    assert order.local_ranks == (4, 5) and not order.is_whole


def test_order_without_ranks_is_for_the_whole_world():
    order = GangOrder(3, "m:f", Path("/logs"))
    assert order.local_ranks == (0, 1, 2) and order.is_whole
    assert GangOrder.from_json(json.loads(json.dumps(order.to_json()))) == order


@pytest.mark.parametrize(
    "fields",
    [{"ranks": (1, 0)}, {"ranks": (0, 4)}, {"ranks": ()}, {"ranks": (1, 2)}, {"ranks": (0, 1), "rendezvous": OTHER}],
)
def test_order_that_contradicts_itself_is_refused(fields):
    with pytest.raises(AssertionError):
        GangOrder(4, "m:f", Path("/logs"), **fields)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_network_of_a_loopback_address_is_left_as_it_is(address):
    assert network_environ(address) == {}


@pytest.mark.parametrize("address", ["192.0.2.77", "no-such-host.invalid"])
def test_network_of_an_address_that_is_not_ours_is_a_user_error(address):
    for ask in (network_environ, lambda address: listen(address, 1)):
        with pytest.raises(PhalanxError, match="interfaces"):
            ask(address)


def test_network_of_an_own_address_names_its_interface(monkeypatch):
    monkeypatch.setattr("phalanx.gang.linux.interface_addresses", lambda: [("lo", "127.0.0.1"), ("eth7", "192.0.2.9")])
    assert network_environ("192.0.2.9") == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "=eth7"}
