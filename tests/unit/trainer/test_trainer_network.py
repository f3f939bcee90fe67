"""What a rank does with `[cluster.network]` before NCCL opens."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.spec.network import Network
from phalanx.trainer.network import enter_network, selected

INTERFACES = ("docker0", "eth0", "eth1", "eth10", "lo")


@pytest.mark.parametrize(
    "chosen, expected",
    [
        ("eth", ["eth0", "eth1", "eth10"]),
        ("=eth0", ["eth0"]),
        ("=eth0,eth1", ["eth0", "eth1"]),
        ("eth1", ["eth1", "eth10"]),
        ("^docker", ["eth0", "eth1", "eth10", "lo"]),
        ("^=eth1,lo", ["docker0", "eth0", "eth10"]),
        ("=ib0", []),
    ],
)
def test_selection_is_that_of_nccl(chosen: str, expected: list[str]) -> None:
    assert selected(chosen, INTERFACES) == expected


def test_ports_do_not_belong_to_the_name() -> None:
    assert selected("=mlx5_0:1,mlx5_1::0:1", ["mlx5_0", "mlx5_1", "mlx5_10"]) == ["mlx5_0", "mlx5_1"]


def test_rank_gets_the_job_files_settings_and_says_what_they_overrule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    environ = {"NCCL_IB_TC": "0", "NCCL_DEBUG": "INFO"}
    network = Network(interfaces="=eth1", ib_hca="=mlx5_0:1", ib_traffic_class=106, transport="IB")
    with caplog.at_level(logging.WARNING):
        enter_network(network, environ=environ, adapters_folder=tmp_path, interfaces=INTERFACES)
    assert environ == {
        "NCCL_SOCKET_IFNAME": "=eth1",
        "NCCL_IB_HCA": "=mlx5_0:1",
        "NCCL_IB_TC": "106",
        "NCCL_NET": "IB",
        "NCCL_DEBUG": "INFO",
    }
    assert [record.getMessage().split()[0] for record in caplog.records] == ["NCCL_IB_TC"]


@pytest.mark.parametrize(
    "stated, where, expected",
    [
        ({"interfaces": "=ib0"}, "interfaces", r"one of the network interfaces that are up on this host \(docker0, "),
        ({"ib_hca": "mlx5"}, "ib_hca", r"one of the RDMA adapters on this host \(there are none\)"),
        ({"transport": "IB"}, "transport", "RDMA adapters on this host"),
        ({"topology_file": "/nowhere/topology.xml"}, "topology_file", "a file that can be read"),
    ],
)
def test_what_the_host_lacks_is_named_and_nothing_is_set(
    tmp_path: Path, stated: dict[str, str], where: str, expected: str
) -> None:
    environ: dict[str, str] = {}
    with pytest.raises(PhalanxError, match=expected) as caught:
        enter_network(
            Network(**stated), environ=environ, adapters_folder=tmp_path / "infiniband", interfaces=INTERFACES
        )
    assert caught.value.where == f"cluster.network.{where}" and environ == {}


def test_interfaces_are_those_of_this_host() -> None:
    environ: dict[str, str] = {}
    enter_network(Network(interfaces="=lo"), environ=environ)
    assert environ == {"NCCL_SOCKET_IFNAME": "=lo"}
