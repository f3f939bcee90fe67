"""The agent's small rules: slots, GPUs, the node's name, logs, repeated orders, orders for ranks, records."""

import json
import math
import threading
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from phalanx.agent import records
from phalanx.agent.access import ACCESS
from phalanx.agent.agent import socket_path
from phalanx.agent.attempts import Attempt, Attempts
from phalanx.agent.gangs import GangKey
from phalanx.agent.inventory import Gpu, node_id, take_inventory, visible
from phalanx.agent.logs import MOST_BYTES, read_chunk
from phalanx.agent.options import Options
from phalanx.agent.orders import OrderBook
from phalanx.agent.slots import Slots
from phalanx.api.agent.v1 import agent_service_pb2 as agent_pb
from phalanx.api.agent.v1 import rank_service_pb2
from phalanx.api.agent.v1 import record_pb2 as pb
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.core.expert_load import ExpertHeat, ExpertLoad
from phalanx.core.step_parts import Part, StepParts
from phalanx.gang import Cause, Event, GangOutcome
from phalanx.gang.cause import CauseKind
from phalanx.rpc.errors import FailedPrecondition, Superseded
from phalanx.rpc.server import access_problems
from phalanx.trainer.expert_figures import heat_fields

GPUS = tuple(Gpu(index, "H100", f"GPU-{index}{index}", 80 << 30) for index in range(4))
KEY = GangKey("projects/p/jobs/u", 3)


def test_access_names_every_method_of_the_ranks_service():
    assert access_problems(ACCESS, [rank_service_pb2.DESCRIPTOR.services_by_name["RankService"]]) == []


def test_slots_of_a_gang_are_its_own_until_it_is_gone():
    slots = Slots(4, GPUS)
    assert slots.take(KEY, 2) == {"CUDA_VISIBLE_DEVICES": "GPU-00,GPU-11"}
    other = GangKey("projects/p/jobs/other", 1)
    assert slots.take(other, 2) == {"CUDA_VISIBLE_DEVICES": "GPU-22,GPU-33"}
    with pytest.raises(OutsideError, match="0 of 4 are free"):
        slots.take(GangKey("projects/p/jobs/third", 1), 1)
    slots.free(KEY)
    assert slots.take(GangKey("projects/p/jobs/third", 1), 1) == {"CUDA_VISIBLE_DEVICES": "GPU-00"}


def test_slots_without_gpus_set_no_environment():
    assert Slots(2, ()).take(KEY, 2) == {}


@pytest.mark.parametrize(
    ("variable", "indices"),
    [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), ("GPU-3", [3]), ("1,9,0", [1]), ("", []), ("1,1", [1]), ("-1", [])],
)
def test_visible_gpus_are_read_as_cuda_does(variable, indices):
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert [gpu.index for gpu in visible(GPUS, environ)] == indices


def test_inventory_without_options_offers_a_slot_a_cpu_or_gpu(tmp_path):
    found = take_inventory(Options(tmp_path))
    assert found.num_slots == (len(found.gpus) or found.num_cpus)


def test_inventory_more_slots_than_gpus_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.agent.inventory.find_gpus", lambda: GPUS)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert take_inventory(Options(tmp_path, slots=3)).num_slots == 3
    with pytest.raises(PhalanxError, match="4 GPUs"):
        take_inventory(Options(tmp_path, slots=5))


def test_node_id_stays_for_the_state_folder_and_may_be_given(tmp_path):
    first = node_id(Options(tmp_path / "a"))
    assert node_id(Options(tmp_path / "a")) == first != node_id(Options(tmp_path / "b"))
    assert node_id(Options(tmp_path, node="rack3-7")) == "rack3-7"


def test_socket_path_that_is_too_long_gets_a_short_name_that_stays(tmp_path):
    assert socket_path(Options(tmp_path)).is_relative_to(tmp_path)
    long = Options(tmp_path / ("x" * 120))
    path = socket_path(long)
    assert len(str(path)) <= 107 and path == socket_path(long) != socket_path(Options(tmp_path / ("y" * 120)))


def test_log_chunk_offsets_count_from_either_end(tmp_path):
    path = tmp_path / "log"
    assert read_chunk(path, 0, 0).size == 0
    path.write_bytes(b"0123456789")
    assert [read_chunk(path, *where).data for where in ((0, 3), (8, 0), (-3, 2), (-99, 1), (99, 5))] == [
        b"012",
        b"89",
        b"78",
        b"0",
        b"",
    ]
    path.write_bytes(b"x" * (MOST_BYTES + 5))
    assert len(read_chunk(path, 0, 10 * MOST_BYTES).data) == MOST_BYTES


def test_order_book_answers_again_and_forgets_the_oldest_answers_alone():
    sent = []
    book = OrderBook(sent.append, most_kept=2)
    assert book.is_new("a") and not book.is_new("a") and sent == []
    book.answer("a", 1)
    assert not book.is_new("a") and sent == [1, 1]
    assert book.is_new("running")
    for order in ("b", "c", "d"):
        assert book.is_new(order)
        book.answer(order, order)
    assert book.is_new("a") and not book.is_new("running") and not book.is_new("d")


def test_attempts_orders_come_in_order_behind_the_last_one_known_until_the_attempt_closes():
    attempts, over = Attempts(), threading.Event()
    attempts.open(Attempt(KEY, None, "secret"))
    for order in (2, 1, 2):
        attempts.give(KEY, order)
    told = []
    thread = threading.Thread(target=lambda: told.extend(attempts.orders(KEY, 1, over)))
    thread.start()
    attempts.close(KEY)
    thread.join(5.0)
    assert told in ([(2, 1), (3, 2)], [])  # closed before or after they were read
    attempts.open(Attempt(KEY, None, "secret"))
    stream = attempts.orders(KEY, 0, over)
    attempts.give(KEY, 1)
    assert next(stream) == (1, 1)


def test_attempts_older_than_the_newest_here_are_superseded_and_unknown_ones_refused():
    attempts = Attempts()
    attempts.open(Attempt(KEY, (1, 5), "secret"))
    assert attempts.get(KEY).parent == (1, 5)
    with pytest.raises(Superseded, match="attempt 3"):
        attempts.get(GangKey(KEY.job, 2))
    with pytest.raises(FailedPrecondition):
        attempts.get(GangKey(KEY.job, 4))


def test_attempt_shows_its_token_to_nobody():
    assert "secret" not in repr(Attempt(KEY, None, "secret"))


def record_of(kind, rank=0, **fields):
    event = Event(rank, kind, fields, 12.5)
    return records.to_record(event, attempt=3, node="n", started_s=10.0, wall_s=1.75e9)


@pytest.mark.parametrize(
    ("kind", "fields", "droppable"),
    [
        ("entry", {"deadline_s": 120.0}, True),
        ("phase", {"name": "step", "step": 4, "deadline_s": 60}, True),
        ("phase", {"name": "step", "step": 4, "deadline_s": None}, True),
        (
            "progress",
            {"step": 4, "loss": None, "gradient_norm": 1, "lr": 0.1, "tokens": 9, "step_time_s": 1, "data_wait_s": 0},
            True,
        ),
        ("step_time", {"step": 4, "step_time_s": 1.5, "busy_s": 1.0}, True),
        ("save", {"step": 4, "stall_s": 0.25, "num_skipped": 0}, True),
        ("save", {"step": 4, "stall_s": None, "num_skipped": 1}, True),
        ("committed", {"attempt": 3, "step": 4}, False),
        ("non_finite", {"step": 4, "loss": "nan", "gradient_norm": "inf"}, False),
        ("evaluation", {"step": 4, "loss": 2.5}, False),
        (
            "expert_heat",
            {"step": 4, "num_layers": 1, "num_experts": 2, "experts_per_cell": 1, "load": "AIA="},
            True,
        ),
        ("overflow", {"step": 4, "loss": 2.0, "loss_scale": 65536.0}, True),
        ("opened", {"attempt": 3, "step": 4}, False),
        ("restored", {"step": 4, "memory_bytes": 1, "holder_bytes": 2, "storage_bytes": 3, "why": "gone"}, False),
        ("damage", {"checkpoint": "a1-s5", "why": "torn"}, False),
        ("exit", {"exit_code": None, "signal": 9, "sent_by_us": False, "pid": 1, "oom_kills": 0}, False),
        ("finished", {"step": 4}, False),
        ("stopped", {"step": 4}, False),
    ],
)
def test_record_of_every_kind_of_event_has_its_place(kind, fields, droppable):
    record = record_of(kind, **fields)
    assert (record.rank, record.attempt, record.since_start_s) == (0, 3, 2.5)
    assert records.is_droppable(record) == droppable
    assert pb.Record.FromString(record.SerializeToString()) == record


def test_record_of_a_step_tells_the_passes_over_each_source_of_a_mixture():
    fields = {"step": 4, "loss": 1, "gradient_norm": 1, "lr": 0.1, "tokens": 9, "step_time_s": 1, "data_wait_s": 0}
    epochs = {"web": 0.25, "code": 1.5}
    assert dict(record_of("progress", **fields, epochs=epochs).progress.epochs) == epochs
    assert not record_of("progress", **fields).progress.epochs


@pytest.mark.parametrize("kind", ["progress", "step_time"])
def test_record_of_a_step_tells_where_its_time_went_if_the_rank_did(kind):
    fields = {"step": 4, "loss": 1, "gradient_norm": 1, "lr": 0.1, "tokens": 9, "step_time_s": 1, "data_wait_s": 0}
    parts = StepParts.of({Part.FORWARD: 0.25, Part.COMMUNICATION: 0.5})
    message = getattr(record_of(kind, **fields, parts=asdict(parts)), kind).parts
    assert {part: getattr(message, part) for part in Part} == asdict(parts)
    assert not getattr(record_of(kind, **fields), kind).HasField("parts")


def test_record_of_a_step_tells_how_its_experts_were_loaded_if_it_has_any():
    fields = {"step": 4, "loss": 1, "gradient_norm": 1, "lr": 0.1, "tokens": 9, "step_time_s": 1, "data_wait_s": 0}
    load = ExpertLoad(2.5, 1.5, 0.25, 0.125)
    told = record_of("progress", **fields, expert_load=asdict(load), loss_scale=8.0).progress
    assert told.experts == pb.ExpertLoad(worst=2.5, mean=1.5, idle=0.25, balance_loss=0.125)
    assert told.loss_scale == 8.0
    unweighed = record_of("progress", **fields, expert_load=asdict(replace(load, balance_loss=None))).progress
    assert unweighed.HasField("experts") and not unweighed.experts.HasField("balance_loss")
    plain = record_of("progress", **fields).progress
    assert not plain.HasField("experts") and not plain.HasField("loss_scale")


def test_record_of_a_picture_of_all_experts_holds_its_bytes():
    heat = ExpertHeat.of(np.array([[3, 0], [1, 1]]))
    fields = heat_fields(torch.tensor([[3, 0], [1, 1]]))
    told = record_of("expert_heat", step=4, **json.loads(json.dumps(fields))).expert_heat
    assert (told.step, told.num_layers, told.num_experts, told.experts_per_cell) == (4, 2, 2, 1)
    assert told.load == heat.load


def test_record_of_an_evaluation_has_the_jobs_own_metrics_also_where_one_is_not_finite():
    told = record_of("evaluation", step=4, loss=2.5, metrics={"accuracy": 0.5, "odd": None}).evaluation
    assert told.metrics["accuracy"] == 0.5 and math.isnan(told.metrics["odd"]) and len(told.metrics) == 2
    assert not record_of("evaluation", step=4, loss=2.5).evaluation.metrics


def test_record_of_an_error_names_its_cause():
    record = record_of("error", type="ValueError", message="no", where="f.py:3 in g", traceback="...", chain=[])
    assert (record.error.kind, record.error.message, record.error.node_id) == (
        pb.CAUSE_KIND_ERROR,
        "ValueError: no",
        "n",
    )


def test_record_of_what_nobody_needs_is_none():
    assert record_of("result", x=1) is None
    assert record_of("server_lost", rank=None) is None


@pytest.mark.parametrize("kind", CauseKind.__args__)
def test_cause_of_every_kind_has_a_number_in_the_contract(kind):
    told = records.to_cause(Cause(kind, 2, "m", signal=9, exit_code=None), "n")
    assert told.kind != pb.CAUSE_KIND_UNSPECIFIED and told.rank == 2 and not told.HasField("exit_code")


def test_gang_ended_carries_weight_and_steps():
    outcome = GangOutcome("failed", Cause("lost_peer", 1, "gone"), ())
    ended = records.to_gang_ended(outcome, "n", last_step=7, committed_step=5)
    assert (ended.state, ended.weight, ended.last_step, ended.committed_step) == (agent_pb.GANG_STATE_FAILED, 2, 7, 5)
