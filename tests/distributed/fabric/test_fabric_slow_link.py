"""Ranks behind a switch with one slow link: the right pair is named, and none where all links are good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from support import ethernet
from support.ethernet import SlowLink

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", autouse=True)
def needs_namespaces() -> None:
    why = ethernet.why_not()
    if why is not None:
        pytest.skip(why)


def measured(num_ranks: int, slow: list[SlowLink]) -> dict[str, Any]:
    program = Path(__file__).with_name("behind_switch.py")
    command = ["unshare", "--map-root-user", "--net", sys.executable, str(program), str(num_ranks)]
    done = subprocess.run(
        [*command, json.dumps([astuple(each) for each in slow])],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
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
