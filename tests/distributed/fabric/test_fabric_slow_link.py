"""Ranks behind a switch with one slow link: the right pair is named, and none where all links are good."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from support import ethernet
from support.ethernet import SlowLink

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]  # three starts of torch on a busy machine


@pytest.fixture(scope="module", autouse=True)
def needs_namespaces() -> None:
    why = ethernet.why_not()
    if why is not None:
        pytest.skip(why)


def measured(num_ranks: int, slow: list[SlowLink], sizes: Sequence[int] = ()) -> dict[str, Any]:
    program = Path(__file__).with_name("behind_switch.py")
    command = ["unshare", "--map-root-user", "--net", sys.executable, str(program), str(num_ranks)]
    done = subprocess.run(
        [*command, json.dumps([astuple(each) for each in slow]), *map(str, sizes)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize(
    "link",
    [SlowLink(1, 3, delay_s=0.003), SlowLink(0, 2, bytes_per_s=4e7)],
    ids=["latency", "bandwidth"],
)
def test_slow_pair_is_named_and_no_other(link: SlowLink) -> None:
    told = measured(4, [link])
    assert told["slow_pairs"] == [[link.one, link.other]] and told["slow_ranks"] == [], told
    assert told["said"][0].startswith(f"the pair of ranks {link.one} and {link.other} is slow: ")
    latency_s, time_s = told["pairs"][f"{link.one}-{link.other}"]
    assert latency_s >= link.delay_s
    assert time_s >= link.delay_s + ((1 << 20) / link.bytes_per_s if link.bytes_per_s else 0.0)


def test_rank_with_a_slow_adapter_is_named() -> None:
    told = measured(4, [SlowLink(2, other, delay_s=0.003) for other in (0, 1, 3)])
    assert told["slow_ranks"] == [2] and told["slow_pairs"] == [], told


def test_behind_good_links_no_pair_is_named() -> None:
    told = measured(4, [])
    assert told["slow_pairs"] == [] and told["slow_ranks"] == [], told
    assert told["said"][0].startswith("no pair is slow")


def test_ring_and_tree_cross_where_latency_and_rate_of_the_links_say() -> None:
    num_ranks, delay_s, bytes_per_s = 4, 0.004, 1e7
    links = [SlowLink(a, b, delay_s, bytes_per_s) for a, b in itertools.combinations(range(num_ranks), 2)]
    told = measured(num_ranks, links, [1 << 10, 1 << 14, 1 << 18, 1 << 20])
    # The ring has 6 steps of a quarter of the data, the tree 4 of all of it. gloo's receiver first says that it is
    # ready: in a tree it does so ahead, in a ring only as the step begins, which then costs two delays. And connections
    # start slowly, which costs long messages more.
    least, most = (num_delays * delay_s * bytes_per_s / (4 - 6 / num_ranks) for num_delays in (6 - 4, 2 * 6 - 4))
    crossing = told["crossings"]["dp_shard"]
    assert crossing["num_bytes"] is not None and least / 2 < crossing["num_bytes"] < 3 * most, (crossing, least, most)
    assert crossing["said"].startswith("the tree is faster below ")
