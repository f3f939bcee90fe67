from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.planner import (
    ModelShape,
    RunShape,
    count_parameters,
    gpu_memory_bytes,
    num_micro_batches,
    positions,
    rank_memory,
    stage_passes_in_flight,
)
from phalanx.planner.activations import activation_bytes, kept_bytes_per_token, layer_bytes_per_token
from phalanx.planner.pipeline_memory import (
    boundary_bytes,
    passes_by_half,
    passes_waiting_for_weights,
    waiting_bytes_per_token,
)
from phalanx.planner.pipeline_order import rank_orders
from phalanx.planner.stages import layers_of_stages
from phalanx.spec import Layout

MODEL = ModelShape(dim=64, n_layers=8, n_heads=8, n_kv_heads=4, ffn_dim=192, vocab_size=512)
PARAMETERS = count_parameters(MODEL).total
RUN = RunShape(seq_len=128, global_batch_size=64)


def of(layout, **changes):
    return rank_memory(MODEL, layout, dataclasses.replace(RUN, **changes), runtime_bytes=0)


def moments(layout, **changes):
    """Activations of each pipeline position."""
    run = dataclasses.replace(RUN, **changes)
    return [activation_bytes(MODEL, layout, run, each) for each in positions(MODEL, layout, run)]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("dp_shard", [1, 2, 8])
def test_masters_and_moments_are_sharded_at_every_stage(zero, dp_shard):
    (rank,) = of(Layout(dp_shard=dp_shard), zero=zero)
    assert rank.masters_bytes == 4 * PARAMETERS // dp_shard and rank.optimizer_bytes == 8 * PARAMETERS // dp_shard


@pytest.mark.parametrize("dp_shard", [1, 4])
def test_local_updates_hold_the_outer_momentum_and_what_a_round_began_with(dp_shard):
    (plain,), (local,) = (of(Layout(dp_replicate=2, dp_shard=dp_shard), local_steps=steps) for steps in (0, 10))
    assert local.optimizer_bytes - plain.optimizer_bytes == 8 * PARAMETERS // dp_shard
    assert local.total_bytes - plain.total_bytes == local.optimizer_bytes - plain.optimizer_bytes


def test_compression_holds_errors_and_what_it_works_on():
    layout = Layout(dp_replicate=2, dp_shard=4)
    (plain,) = of(layout)
    for method, num_bytes in (("powersgd", 8), ("onebit_adam", 18)):
        (rank,) = of(layout, compression=method, compression_rank=4, compresses_ends=True)
        assert rank.optimizer_bytes - plain.optimizer_bytes == num_bytes * (PARAMETERS // 4)
    (hidden,) = of(layout, compression="powersgd", compression_rank=4)
    ends = 2 * 512 * 64 + 64
    assert hidden.optimizer_bytes - plain.optimizer_bytes == 8 * ((PARAMETERS - ends) // 4)


LAYER = 64 * 8 * (2 * 8 + 2 * 4) + 3 * 64 * 192 + 2 * 64


def test_zero_1_holds_six_bytes_and_twelve_over_n_with_several_micro_batches():
    (rank,) = of(Layout(dp_shard=8), zero=1)
    held = rank.masters_bytes + rank.weights_bytes + rank.gradients_bytes + rank.optimizer_bytes
    assert held == 6 * PARAMETERS + 12 * PARAMETERS // 8
    (again,) = of(Layout(dp_shard=8), zero=1, recompute=True)  # a layer's buffer of the reduction, in its backward
    assert again.gradients_bytes == 4 * (PARAMETERS + LAYER)


@pytest.mark.parametrize(("layout", "changes"), [(Layout(dp_shard=8), {"zero": 1}), (Layout(pp=2, dp_shard=2), {})])
def test_gradients_that_are_whole_take_half_where_they_are_summed_in_two_bytes(layout, changes):
    for wide, narrow in zip(of(layout, **changes), of(layout, **changes, reduce_bytes=2), strict=True):
        assert narrow.gradients_bytes == wide.gradients_bytes // 2
        assert wide.total_bytes - narrow.total_bytes == narrow.gradients_bytes


def test_gradients_of_a_single_micro_batch_take_the_place_of_activations():
    (large,) = of(Layout(dp_shard=2), local_batch_size=32)
    (small,) = of(Layout(dp_shard=2), global_batch_size=2, seq_len=2)
    head, ends = 512 * 64, 2 * 512 * 64 + 64
    assert large.gradients_bytes == 0 and large.activations_bytes == moments(Layout(), local_batch_size=32)[0].in_loss
    assert small.gradients_bytes + small.activations_bytes == 4 * PARAMETERS // 2 + 6 * ends
    # In between: the first layer's inside, and the gradients of all other layers.
    (first,) = of(Layout(dp_shard=2), local_batch_size=2, global_batch_size=4, recompute=True)
    assert first.activations_bytes == moments(Layout(), local_batch_size=2, recompute=True)[0].in_first_layer
    assert first.gradients_bytes == 4 * (PARAMETERS - ends) // 2 + 2 * head + 6 * LAYER


def test_large_vocabulary_costs_logits_and_gradients_in_turns():
    wide = dataclasses.replace(MODEL, vocab_size=1 << 14)
    run = dataclasses.replace(RUN, zero=3, global_batch_size=2, seq_len=256)
    (place,), (rank,) = positions(wide, Layout(dp_shard=2), run), rank_memory(wide, Layout(dp_shard=2), run, 0)
    found = activation_bytes(wide, Layout(dp_shard=2), run, place)
    columns, final = 256 << 14, 256 * 64 * (4 + 2 + 2)
    kept = 8 * 256 * layer_bytes_per_token(MODEL, Layout(), 2) + 256**2
    assert found.in_loss == kept + final + columns * (2 + 4)  # the logits and their log-probabilities
    assert found.in_head == kept + final + columns * 2 + 2 * 256 * 64  # the logits' gradient and what it gives
    assert found.in_layers == kept + 256 * layer_bytes_per_token(MODEL, Layout(), 2) // 2
    assert (rank.activations_bytes, rank.gradients_bytes) == (found.in_loss, 0)


@pytest.mark.parametrize(("layout", "changes"), [(Layout(tp=2), {}), (Layout(), {"plain_loss": False})])
def test_loss_of_parts_of_the_vocabulary_and_with_the_z_loss_keeps_logits_and_exponentials_apart(layout, changes):
    ((plain,), (apart,)) = moments(Layout(), document_mask=False), moments(layout, document_mask=False, **changes)
    wide = moments(layout, document_mask=False, param_bytes=4, **changes)[0]
    columns, tp = 128 * 512, layout.tp
    assert plain.in_loss - plain.in_head == columns * 4 - 2 * 128 * 64
    assert apart.in_loss - apart.in_head == columns * 8 // tp - 2 * 128 * 64
    assert wide.in_loss - wide.in_head == columns * 4 // tp - 4 * 128 * 64  # no copy in fp32 beside the logits


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 1), ("looped_bfs", 2), ("1f1b", 1), ("zbv", 2)])
def test_micro_batches_behind_the_head_are_those_of_the_schedules_order(schedule, stages):
    changes = {"schedule": schedule, "stages_per_rank": stages, "global_batch_size": 8, "document_mask": False}
    layout = Layout(pp=2)
    order = rank_orders(schedule, 2, stages, 8)
    at_head = [a.kind.value for rank in order for a in rank if a.stage == 2 * stages - 1 and a.kind.value != "W"]
    passed = [at_head[: n + 1].count("F") - n - 1 + at_head[: n + 1].count("F") for n in range(len(at_head))]
    behind = max(passed) - 1
    rank = next(
        n for n, each in enumerate(positions(MODEL, layout, dataclasses.replace(RUN, **changes))) if each.is_last
    )
    small = dataclasses.replace(MODEL, vocab_size=2)
    run = dataclasses.replace(RUN, **changes)
    large, less = (activation_bytes(m, layout, run, positions(m, layout, run)[rank]) for m in (MODEL, small))
    assert large.in_layers - less.in_layers == behind * 128 * (512 - 2) * 4


def test_gradients_of_large_ends_come_when_activations_are_gone():
    wide = dataclasses.replace(MODEL, vocab_size=1 << 16)
    (rank,) = rank_memory(wide, Layout(), dataclasses.replace(RUN, zero=2, chunk_tokens=1, seq_len=8), 0)
    ends = 2 * (1 << 16) * 64 + 64
    assert rank.gradients_bytes + rank.activations_bytes == 6 * ends + 4 * count_parameters(wide).total


def test_zero_2_holds_one_layers_gradients_whole_and_zero_3_two_layers_of_weights():
    layer, ends = LAYER, 2 * 512 * 64 + 64
    (two,), (three,) = of(Layout(dp_shard=8), zero=2), of(Layout(dp_shard=8), zero=3)
    assert two.weights_bytes == 2 * PARAMETERS and three.weights_bytes == 2 * (2 * layer + ends)
    head = 512 * 64
    assert two.gradients_bytes == three.gradients_bytes == 4 * PARAMETERS // 8 + 2 * head + 6 * layer


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=8), Layout(dp_replicate=2, dp_shard=4), Layout(pp=2)])
@pytest.mark.parametrize("zero", [1, 3])
def test_offload_moves_masters_moments_and_sharded_gradients_to_the_host(layout, zero):
    for kept, moved in zip(of(layout, zero=zero), of(layout, zero=zero, cpu_offload=True), strict=True):
        assert kept.host_bytes == 0 and moved.host_bytes == 16 * (moved.parameters // layout.dp_shard)
        assert moved.state_bytes == kept.state_bytes, "a checkpoint is as large"
        assert moved.total_bytes == moved.weights_bytes + moved.gradients_bytes + moved.activations_bytes
        assert moved.total_bytes < kept.total_bytes
        layer = moved.weights_bytes - kept.weights_bytes
        assert 4 * LAYER // layout.dp_shard <= layer < kept.masters_bytes


def test_copy_of_a_tied_embedding_has_a_master_and_a_gradient_but_no_moments():
    tied = dataclasses.replace(MODEL, tie_embeddings=True)
    layout = Layout(pp=2, dp_shard=2)
    first, last = rank_memory(tied, layout, RUN, 0)
    untied_first, untied_last = of(layout)
    assert first == untied_first and last.masters_bytes == untied_last.masters_bytes
    assert untied_last.optimizer_bytes - last.optimizer_bytes == 8 * 512 * 64 // 2
    assert last.gradients_bytes == untied_last.gradients_bytes


def test_pipeline_keeps_weights_and_gradients_whole_whatever_the_stage():
    for zero in (1, 3):
        first, last = of(Layout(pp=2, dp_shard=4), zero=zero)
        assert (first.weights_bytes, last.weights_bytes) == (2 * first.parameters, 2 * last.parameters)
        assert first.gradients_bytes == 4 * (first.parameters + LAYER)
        assert last.gradients_bytes == 4 * last.parameters, "most is there at the loss, between two backwards"


def test_float32_weights_take_twice_the_gathered_bytes():
    (half,), (full,) = of(Layout(dp_shard=2), zero=1), of(Layout(dp_shard=2), zero=1, param_bytes=4)
    assert full.weights_bytes == 2 * half.weights_bytes


@given(pp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4]), dp_shard=st.sampled_from([1, 2, 3, 8]))
def test_state_of_all_ranks_is_twelve_bytes_a_parameter_and_the_copies_of_norms(pp, tp, dp_shard):
    ranks = of(Layout(pp=pp, tp=tp, dp_shard=dp_shard))
    copied = (tp - 1) * count_parameters(MODEL).norms
    state = sum(rank.state_bytes for rank in ranks) * tp * dp_shard
    exact = 12 * (PARAMETERS + copied)
    assert exact <= state <= exact + 12 * pp * tp * dp_shard


@given(
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    local=st.integers(1, 4),
    recompute=st.booleans(),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zbv"]),
)
def test_more_splitting_never_costs_activation_memory(tp, cp, local, recompute, schedule):
    per_rank = 2 if schedule in ("interleaved_1f1b", "zbv") else 1
    changes = {"local_batch_size": local, "schedule": schedule, "stages_per_rank": per_rank, "recompute": recompute}
    for less, more in (
        (Layout(pp=2, tp=1, cp=cp), Layout(pp=2, tp=tp, cp=cp)),
        (Layout(pp=2, tp=tp), Layout(pp=2, tp=tp, cp=2)),
    ):
        for a, b in zip(moments(less, **changes), moments(more, **changes), strict=True):
            assert all(y <= x for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True))


def test_recompute_keeps_a_layers_input_and_one_layers_inside():
    layout = Layout()
    plain, again = (moments(layout, recompute=each, document_mask=False)[0] for each in (False, True))
    inside = 128 * layer_bytes_per_token(MODEL, layout, 2)
    assert plain.in_layers - again.in_layers == 8 * inside - inside - 8 * 128 * 2 * 64
    assert plain.in_first_layer == again.in_first_layer == inside * 3 // 2


def test_selective_recompute_also_keeps_what_products_and_attention_give():
    model, layout = dataclasses.replace(MODEL, n_layers=1), Layout(tp=2)
    run = dataclasses.replace(RUN, recompute=True, keeps_products=True)
    # The input 2 x 64, queries, keys, values 2 x 128, attention 2 x 64 and 4 x 8, SwiGLU 2 x 2 x 192: all over tp; and
    # two outputs of 2 x 64.
    assert kept_bytes_per_token(model, layout, run) == (128 + 256 + 128 + 32 + 768) / 2 + 256
    modes = [{}, {"recompute": True, "keeps_products": True}, {"recompute": True}]
    none, selective, full = (of(Layout(), **mode)[0].activations_bytes for mode in modes)
    assert none > selective > full


def test_recompute_of_every_nth_layer_follows_its_number_in_the_model():
    run = dataclasses.replace(RUN, recompute=True, recompute_every=4, schedule="interleaved_1f1b", stages_per_rank=2)
    stages = [layers_of_stages(MODEL, Layout(pp=2), run, each) for each in positions(MODEL, Layout(pp=2), run)]
    assert stages == [(range(2), range(4, 6)), (range(2, 4), range(6, 8))]
    first, second = (each.activations_bytes for each in rank_memory(MODEL, Layout(pp=2), run, runtime_bytes=0))
    nothing = dataclasses.replace(run, recompute=False)
    plain, same = (each.activations_bytes for each in rank_memory(MODEL, Layout(pp=2), nothing, runtime_bytes=0))
    assert first < plain and second == same  # layers 0 and 4 both lie on the first rank


def test_recompute_frees_the_layers_behind_it_before_it_needs_their_room():
    every = [moments(Layout(), recompute=True, recompute_every=n, document_mask=False)[0].in_layers for n in (1, 8)]
    inside, kept = 128 * layer_bytes_per_token(MODEL, Layout(), 2), 128 * 2 * 64
    assert every[1] - every[0] == 7 * (inside - kept) - inside


def test_layer_activations_are_those_counted_by_hand():
    # Norms 2 x (4 + 2) x 64, their outputs 2 x 2 x 64, attention 4 x 2 x 64 and 4 x 8, SwiGLU 4 x 2 x 192.
    assert layer_bytes_per_token(MODEL, Layout(), 2) == 768 + 256 + 512 + 32 + 1536
    assert layer_bytes_per_token(MODEL, Layout(tp=2), 2) == 256 + (768 + 512 + 32 + 1536) / 2
    normed = dataclasses.replace(MODEL, qk_norm=True)
    more = layer_bytes_per_token(normed, Layout(tp=2), 2) - layer_bytes_per_token(MODEL, Layout(tp=2), 2)
    assert more == (4 + 2) * (8 + 4) * 8 / 2


@pytest.mark.parametrize(
    "schedule, stages, expected",
    [
        ("gpipe", 1, [8, 8, 8, 8]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("interleaved_1f1b", 2, [11, 9, 7, 5]),
        ("zbv", 2, [8, 8, 8, 8]),
        ("dualpipev", 2, [9, 9, 9, 9]),
        ("interleaved_zero_bubble", 2, [8, 8, 8, 8]),
    ],
)
def test_passes_in_flight_follow_the_schedule(schedule, stages, expected):
    layout, run = Layout(pp=4), RunShape(128, 8, schedule=schedule, stages_per_rank=stages)
    assert [stage_passes_in_flight(layout, run, rank) for rank in range(4)] == expected


@pytest.mark.parametrize(
    "layout, run, expected",
    [
        (Layout(dp_shard=4), RunShape(128, 16), 4),
        (Layout(dp_shard=3), RunShape(128, 16), 6),
        (Layout(dp_replicate=2, dp_shard=2), RunShape(128, 16, local_batch_size=2), 2),
        (Layout(pp=4, dp_shard=3), RunShape(128, 16), 8),
        (Layout(pp=4), RunShape(128, 9, schedule="dualpipev", stages_per_rank=2), 16),
        (Layout(pp=4), RunShape(128, 9, schedule="gpipe"), 9),
    ],
)
def test_micro_batches_are_rounded_up_to_what_the_schedule_admits(layout, run, expected):
    assert num_micro_batches(layout, run) == expected


@pytest.mark.parametrize(
    "schedule, stages", [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2), ("dualpipev", 2)]
)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_and_micro_batches_are_those_of_the_pipeline_itself(schedule, stages, pp):
    from phalanx.parallel.schedules import multiple_of, stages_of

    layout, run = Layout(pp=pp), RunShape(128, 9, schedule=schedule, stages_per_rank=stages)
    multiple = multiple_of(schedule, pp)
    assert num_micro_batches(layout, run) == -(-9 // multiple) * multiple
    if pp > 1:
        for place in positions(MODEL, layout, run):
            assert place.stages == stages_of(schedule, pp, place.pp_rank, stages)


def test_pass_in_flight_keeps_what_its_stage_took_and_gave():
    layout, tensor = Layout(pp=2, tp=2), 128 * 64 * 2 // 2
    run = dataclasses.replace(RUN, global_batch_size=8)
    first, last = (boundary_bytes(MODEL, layout, run, each) for each in positions(MODEL, layout, run))
    # Two passes' outputs and a gradient on its way; one pass's input and another one on its way.
    assert (first, last) == (3 * tensor, 2 * tensor)
    wide = dataclasses.replace(run, param_bytes=4)  # an input in flight is what the first norm keeps
    assert boundary_bytes(MODEL, layout, wide, positions(MODEL, layout, wide)[1]) == 2 * tensor
    (alone,) = positions(MODEL, Layout(tp=2), run)
    assert boundary_bytes(MODEL, Layout(tp=2), run, alone) == 0


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv", "dualpipev", "interleaved_zero_bubble"])
def test_passes_that_wait_for_their_weights_are_those_of_the_schedules_order(schedule, pp):
    per_rank = 1 if schedule in ("gpipe", "1f1b") else 2
    layout, run = Layout(pp=pp), RunShape(128, 8 * pp, schedule=schedule, stages_per_rank=per_rank)
    for rank, order in enumerate(rank_orders(schedule, pp, per_rank, 8 * pp)):
        held = waiting = 0
        found = (0, 0)
        for action in order:
            waiting += {"I": 1, "W": -1}.get(action.kind.value, 0)
            held += {"F": 1, "B": -1, "W": -1}.get(action.kind.value, 0)
            found = max(found, (held, waiting))
        assert found[1] == passes_waiting_for_weights(layout, run, rank), (rank, found)


@pytest.mark.parametrize("pp", [2, 3, 4, 6])
@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("zbv", 2), ("dualpipev", 2), ("interleaved_zero_bubble", 2), ("interleaved_zero_bubble", 3)],
)
def test_passes_between_the_halves_of_their_backward_are_those_of_the_schedules_order(schedule, stages, pp):
    layout, run = Layout(pp=pp), RunShape(128, 4 * pp, schedule=schedule, stages_per_rank=stages)
    for rank, order in enumerate(rank_orders(schedule, pp, stages, 4 * pp)):
        held = waiting = 0
        seen = set()
        for action in order:
            held += action.kind.value == "F"
            waiting += action.kind.value == "I" and action.stage > 0
            seen.add((held, waiting))
            held -= action.kind.value in "BW"
            waiting -= action.kind.value == "W" and action.stage > 0
        told = passes_by_half(layout, run, rank)
        assert all(any(h <= a and w <= b for a, b in told) for h, w in seen), "none is more"
        assert all(any(h >= a and w >= b for h, w in seen) for a, b in told), "each is there"


def test_what_waits_for_weights_is_a_gradient_of_each_product_and_norm():
    # Queries 64, keys and values 2 x 32, the output 64, SwiGLU 2 x 192 and 64; two norms of 64.
    assert waiting_bytes_per_token(MODEL, Layout(), 2) == 2 * (64 + 64 + 64 + 2 * 192 + 64 + 2 * 64)
    assert waiting_bytes_per_token(MODEL, Layout(tp=2), 4) == 4 * ((64 + 64 + 2 * 192) / 2 + 4 * 64)


def test_v_schedule_has_both_ends_of_the_model_on_the_first_rank():
    first, last = positions(MODEL, Layout(pp=2), RunShape(128, 8, schedule="zbv", stages_per_rank=2))
    assert first.is_first and first.is_last and not last.is_first and not last.is_last


def test_unknown_gpu_is_answered_with_the_nearest():
    assert gpu_memory_bytes("h100-80") == 81_559 * 2**20
    with pytest.raises(PhalanxError, match="did you mean A100-80"):
        gpu_memory_bytes("A100-88")


def test_ranks_that_share_a_window_share_the_states_too():
    (two,), (four,) = of(Layout(dp_shard=2)), of(Layout(dp_shard=2, cp=2))
    assert four.masters_bytes == 4 * PARAMETERS // 4 == two.masters_bytes // 2


def test_logits_by_chunks_cost_those_of_one_chunk_and_the_heads_gradient():
    (whole,), (chunked,) = moments(Layout()), moments(Layout(), chunk_tokens=16)
    of_head, of_input = 512 * 64, 128 * 64
    by_chunk = 16 * 512 * (2 + 8) + 4 * of_head + 2 * of_input
    assert whole.in_loss - chunked.in_loss == 128 * 512 * (2 + 4) - by_chunk
    assert chunked.in_loss - chunked.in_head == 16 * 512 * (2 + 8) - 2 * of_head  # rounded when all chunks are done


def test_split_backward_holds_what_the_passes_between_its_halves_computed_again():
    changes = {"schedule": "interleaved_zero_bubble", "stages_per_rank": 2, "document_mask": False, "param_bytes": 4}
    layout = Layout(pp=2)
    inside = 128 * (layer_bytes_per_token(MODEL, layout, 4) - 4 * 64)
    for rank, (plain, again) in enumerate(
        zip(moments(layout, **changes), moments(layout, recompute=True, **changes), strict=True)
    ):
        waiting = passes_by_half(layout, dataclasses.replace(RUN, **changes), rank)
        most, halves = max(waiting, key=lambda each: each[1])
        assert halves == rank + 1 and most == 4
        assert plain.in_layers - again.in_layers == (most - halves) * 2 * inside
