"""`[cluster.network]`: which values are taken, which variables of NCCL they become, and what the environment adds."""

from __future__ import annotations

import dataclasses

import pytest
from spec_samples import sample, tables

from phalanx.core.errors import Problems
from phalanx.spec import parse_job
from phalanx.spec.effects import without_effect
from phalanx.spec.foreign import SAME_MEANING
from phalanx.spec.network import VARIABLES, Network, Setting, disagreements, settings_of, variables_of

STATED = {
    "interfaces": ("=eth0,eth1", "=eth0,eth1"),
    "transport": ("IB", "IB"),
    "ib_hca": ("^=mlx5_1:1,mlx5_4", "^=mlx5_1:1,mlx5_4"),
    "ib_gid_index": (3, "3"),
    "ib_roce_version": (2, "2"),
    "ib_address_family": ("ipv6", "AF_INET6"),
    "ib_address_range": ("10.1.0.0/16", "10.1.0.0/16"),
    "ib_traffic_class": (106, "106"),
    "ib_control_traffic_class": (0, "0"),
    "ib_service_level": (1, "1"),
    "ib_partition_index": (7, "7"),
    "ib_timeout": (22, "22"),
    "ib_retry_count": (7, "7"),
    "ib_queue_pairs": (4, "4"),
    "ib_adaptive_routing": (False, "0"),
    "cross_nic": (0, "0"),
    "gpu_direct_level": ("PHB", "PHB"),
    "topology_file": ("/etc/nccl/topology.xml", "/etc/nccl/topology.xml"),
}


def test_every_key_has_a_variable_that_its_description_names():
    assert set(VARIABLES) == set(Network.model_fields) == set(STATED)
    for name, field in Network.model_fields.items():
        assert f"({VARIABLES[name]})" in (field.description or "")


@pytest.mark.parametrize("name", STATED)
def test_key_becomes_the_text_that_nccl_reads(name):
    value, text = STATED[name]
    job = parse_job(tables(**{f"cluster__network__{name}": value}))
    assert variables_of(job.cluster.network) == {VARIABLES[name]: text}


def test_name_of_the_variable_leads_to_its_key():
    assert {SAME_MEANING[variable.lower()] for variable in VARIABLES.values()} == {
        f"cluster.network.{name}" for name in VARIABLES
    }
    with pytest.raises(Problems, match=r"did you mean cluster.network.ib_traffic_class"):
        parse_job(tables(cluster__network__NCCL_IB_TC=106))


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("interfaces", "eth0;eth1", "names of interfaces as eth0,eth1"),
        ("interfaces", "eth0, eth1", "names of interfaces"),
        ("interfaces", "", "names of interfaces"),
        ("interfaces", "=", "names of interfaces"),
        ("interfaces", "an-interface-of-many-letters", "names of interfaces"),
        ("transport", "infini band", "IB, Socket or the name of a plugin"),
        ("ib_hca", "mlx5_0:one", "names of adapters as mlx5_0:1"),
        ("ib_hca", "mlx5_0:1,", "names of adapters"),
        ("ib_gid_index", -1, "a number at least 0"),
        ("ib_gid_index", "3", "a whole number"),
        ("ib_roce_version", 3, "1 or 2"),
        ("ib_address_family", "AF_INET", "'ipv4' or 'ipv6'"),
        ("ib_address_range", "10.0.0.1/8", "addresses as 10.0.0.0/8"),
        ("ib_traffic_class", 256, "a number at most 255"),
        ("ib_control_traffic_class", -1, "a number at least 0"),
        ("ib_service_level", 16, "a number at most 15"),
        ("ib_partition_index", 70000, "a number at most 65,535"),
        ("ib_timeout", 0, "a number at least 1"),
        ("ib_retry_count", 8, "a number at most 7"),
        ("ib_queue_pairs", 0, "a number at least 1"),
        ("ib_adaptive_routing", 1, "true or false"),
        ("cross_nic", 3, "0, 1 or 2"),
        ("gpu_direct_level", "phb", "'LOC', 'PIX', 'PXB', 'PHB' or 'SYS'"),
        ("topology_file", "topology.xml", "an absolute path of a file"),
    ],
)
def test_wrong_value_is_one_line_with_its_key(name, value, expected):
    with pytest.raises(Problems) as caught:
        parse_job(tables(**{f"cluster__network__{name}": value}))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"cluster.network.{name} is ") and f"expected {expected}" in line


def test_nothing_stated_sets_nothing_and_changes_no_digest():
    job = sample()
    assert variables_of(job.cluster.network) == {}
    stated = sample(cluster__network__ib_traffic_class=106)
    assert stated.identity() == job.identity() and stated.placement(1) == job.placement(1)


def test_settings_are_those_of_the_job_file_above_those_of_the_environment():
    network = Network(ib_traffic_class=106, ib_hca="=mlx5_0")
    environ = {"NCCL_IB_TC": "0", "NCCL_IB_HCA": "=mlx5_0", "NCCL_DEBUG": "INFO", "PATH": "/bin"}
    assert settings_of(network, environ) == (
        Setting("NCCL_DEBUG", "INFO"),
        Setting("NCCL_IB_HCA", "=mlx5_0", "cluster.network.ib_hca"),
        Setting("NCCL_IB_TC", "106", "cluster.network.ib_traffic_class"),
    )
    (said,) = disagreements(network, environ)
    assert said == (
        "NCCL_IB_TC is '0' in the environment, and cluster.network.ib_traffic_class says '106': the job file counts"
    )
    assert disagreements(network, {}) == ()


def without(**changes):
    job = sample(**changes)
    return [said for said in without_effect(job, job.layout(1)) if "network" in said]


def test_keys_without_effect_are_told():
    gid = {"cluster__device": "cuda", "cluster__network__ib_gid_index": 3}
    assert without(cluster__network__ib_gid_index=3) == [
        'cluster.network has no effect, because cluster.device is "cpu", where gloo connects ranks, not NCCL'
    ]
    assert without(**gid) == []
    assert without(**gid, cluster__network__ib_roce_version=1) == [
        "cluster.network.ib_roce_version has no effect, because cluster.network.ib_gid_index is set"
    ]
    assert without(**gid, cluster__network__transport="socket") == [
        'cluster.network.ib_gid_index has no effect, because cluster.network.transport is "Socket"'
    ]


def test_setting_is_a_plain_value():
    assert dataclasses.asdict(Setting("NCCL_NET", "IB")) == {"variable": "NCCL_NET", "value": "IB", "key": ""}
