"""What a rank computes lies beside its communication: by the order of the events in a trace, never by their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from test_parity import _case

from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import run_gang

pytestmark = pytest.mark.distributed

LAYERS = range(4)
CASES = {
    "overlapped": _case(zero=3) | {"overlap": True},
    "whole": _case(zero=2) | {"overlap": True},
    "replicas": _case(dp_replicate=2) | {"overlap": True},
    "awaited": _case(zero=3) | {"overlap": False},
}


@pytest.fixture(scope="module")
def traces(fork_server: ForkServer) -> dict[str, list[str]]:
    """Events of one rank by case."""
    return run_gang(fork_server, 2, "overlap_ranks:run_traced", {"cases": CASES}, timeout_s=110)[0]


def _within(events: Sequence[str], begin: str, end: str) -> Sequence[str]:
    """What lies between the first `begin` and the next `end`."""
    first = events.index(begin)
    return events[first + 1 : events.index(end, first)]


@pytest.mark.parametrize("layer", LAYERS[:-1])
def test_weights_of_the_next_layer_are_on_their_way_before_a_layer_has_computed(
    traces: dict[str, Any], layer: int
) -> None:
    ours, following = f"layers.{layer}", f"layers.{layer + 1}"
    computing = _within(traces["overlapped"], f"FSDP::pre_forward ({ours})", f"FSDP::post_forward ({ours})")
    gather = computing.index(f"FSDP::all_gather ({following})")
    assert "c10d::_allgather_base_" in computing[gather:]
    assert "aten::mm" in computing[gather:] and "wait" not in computing[gather:]
    assert f"FSDP::all_gather_copy_out ({following})" not in computing


def test_first_layer_is_gathered_beside_the_embedding(traces: dict[str, Any]) -> None:
    before = _within(traces["overlapped"], "FSDP::root_pre_forward", "FSDP::pre_forward (layers.0)")
    assert before.index("FSDP::all_gather (layers.0)") < before.index("aten::embedding")


@pytest.mark.parametrize("layer", LAYERS[1:])
def test_weights_of_the_layer_before_are_on_their_way_in_backward(traces: dict[str, Any], layer: int) -> None:
    ours = f"layers.{layer}"
    computing = _within(
        traces["overlapped"], f"FSDP::pre_backward ({ours})", f"FSDP::post_backward_accumulate ({ours})"
    )
    gather = computing.index(f"FSDP::all_gather (layers.{layer - 1})")
    assert "aten::mm" in computing[gather:] and "wait" not in computing[gather:]


@pytest.mark.parametrize("case", ["overlapped", "whole"])
@pytest.mark.parametrize("layer", LAYERS[1:])
def test_gradients_of_a_layer_are_summed_while_backward_goes_on(traces: dict[str, Any], case: str, layer: int) -> None:
    reduce = f"FSDP::post_backward_reduce (layers.{layer})"
    computing = _within(traces[case], reduce, f"FSDP::post_backward_reduce (layers.{layer - 1})")
    begun = computing.index("c10d::alltoall_base_")
    assert "aten::mm" in computing[begun:]
    waits_before_computing = computing[begun : begun + computing[begun:].index("aten::mm")].count("wait")
    gathers = case == "overlapped"  # the weights of the layer before, which are needed now
    assert waits_before_computing == gathers


@pytest.mark.parametrize("layer", LAYERS[1:])
def test_gradients_are_summed_over_replicas_while_backward_goes_on(traces: dict[str, Any], layer: int) -> None:
    reduce = f"FSDP::post_backward_reduce (layers.{layer})"
    computing = _within(traces["replicas"], reduce, f"FSDP::post_backward_reduce (layers.{layer - 1})")
    begun = computing.index("c10d::allreduce_")
    assert "aten::mm" in computing[begun:] and "wait" not in computing


def test_without_overlap_each_collective_is_awaited_where_it_begins(traces: dict[str, Any]) -> None:
    events = traces["awaited"]
    for layer in LAYERS[:-1]:
        computing = _within(events, f"FSDP::pre_forward (layers.{layer})", f"FSDP::post_forward (layers.{layer})")
        assert f"FSDP::all_gather (layers.{layer + 1})" not in computing
    for place, name in enumerate(events):
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            after = [each for each in events[place + 1 :] if not each.startswith(("record_param", "aten::", "gloo:"))]
            assert after[0] == "wait"


def test_block_that_evaluation_leaves_out_is_gathered_anew_for_training(fork_server: ForkServer) -> None:
    """Else it would compute with the weights from before the update, which had been gathered ahead."""
    losses = run_gang(fork_server, 2, "overlap_ranks:run_skipping")[0]
    assert losses["True"] == losses["False"]
    assert losses["True"][0] != losses["True"][1] != losses["True"][2]
