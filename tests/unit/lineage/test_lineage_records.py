"""Step records: columns come back bit for bit, equal rows give equal bytes, damage and rows that cannot be are
refused.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from lineage_kit import memory_store, step_rows, window_rows
from safetensors.numpy import load, save

from phalanx.lineage import DamagedObject, Lineage, ObjectRef, RecordsName, StepRows, WindowRows
from phalanx.lineage.records import decode_records, encode_records

NAME = RecordsName(attempt=1, rank=0, first_step=1, last_step=2)


def columns(rows: WindowRows | StepRows) -> dict[str, tuple[str, bytes]]:
    arrays = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
    return {name: (str(array.dtype), array.tobytes()) for name, array in arrays.items()}


def test_records_read_back_bit_for_bit_with_values_that_are_not_finite():
    steps = dataclasses.replace(step_rows([1, 2]), loss=np.array([np.nan, np.inf]))
    windows = window_rows([1, 1, 2], [0, 1, 2])
    read = decode_records("key", NAME, encode_records(NAME, windows, steps))
    assert columns(read[0]) == columns(windows)
    assert columns(read[1]) == columns(steps)


def test_column_of_bytes_between_replicas_is_stored_where_it_says_something():
    plain = encode_records(NAME, window_rows([1], [0]), step_rows([1, 2]))
    assert "steps.replica_bytes" not in load(plain)
    assert decode_records("key", NAME, plain)[1].replica_bytes.tolist() == [0, 0]
    steps = dataclasses.replace(step_rows([1, 2]), replica_bytes=np.array([0, 4096]))
    told = decode_records("key", NAME, encode_records(NAME, window_rows([1], [0]), steps))[1]
    assert told.replica_bytes.tolist() == [0, 4096]
    assert StepRows.concatenate([steps, step_rows([3])]).replica_bytes.tolist() == [0, 4096, 0]
    with pytest.raises(ValueError, match="columns differ in length"):
        dataclasses.replace(steps, replica_bytes=np.array([1]))


def test_columns_of_experts_and_of_the_loss_scale_are_stored_where_they_say_something():
    plain = encode_records(NAME, window_rows([1], [0]), step_rows([1, 2]))
    later = ("expert_worst", "expert_mean", "expert_idle", "balance_loss", "loss_scale")
    assert not {f"steps.{name}" for name in later} & set(load(plain))
    read = decode_records("key", NAME, plain)[1]
    assert all(np.isnan(getattr(read, name)).all() and len(getattr(read, name)) == 2 for name in later)
    steps = dataclasses.replace(
        step_rows([1, 2]), expert_worst=np.array([0.0, np.nan]), loss_scale=np.array([8.0, 4.0])
    )
    data = encode_records(NAME, window_rows([1], [0]), steps)
    assert {name for name in later if f"steps.{name}" in load(data)} == {"expert_worst", "loss_scale"}
    assert columns(decode_records("key", NAME, data)[1]) == columns(steps)
    joined = StepRows.concatenate([steps, step_rows([3])])
    assert joined.loss_scale.tolist()[:2] == [8.0, 4.0] and np.isnan(joined.loss_scale[2])


def test_column_of_steps_of_a_version_to_come_is_passed_over():
    data = encode_records(NAME, window_rows([1], [0]), step_rows([1, 2]))
    header = {"phalanx": '{"attempt":1,"first_step":1,"format":"phalanx.records/2","last_step":2,"rank":0}'}
    read = decode_records("key", NAME, save(load(data) | {"steps.colour": np.zeros(2)}, header))
    assert columns(read[1]) == columns(step_rows([1, 2]))


def test_overflow_under_a_scaled_loss_is_told_apart_from_what_is_not_finite():
    steps = dataclasses.replace(
        step_rows([1, 2, 3, 4]),
        loss=np.array([2.0, 2.0, np.nan, 2.0]),
        gradient_norm=np.array([np.inf, np.inf, np.nan, 1.0]),
        loss_scale=np.array([8.0, 1.0, 8.0, 8.0]),
    )
    assert steps.overflowed.tolist() == [True, False, False, False]
    assert not dataclasses.replace(steps, loss_scale=np.zeros(0)).overflowed.any(), "with no scale there is none"


def test_records_of_a_rank_without_rows_read_back_empty():
    lineage = Lineage(memory_store())
    windows, steps = lineage.records.read(lineage.records.put(1, 3, 1, 2, None, None))
    assert len(windows) == len(steps) == 0


def test_records_put_again_are_recognised_and_other_rows_are_refused():
    lineage = Lineage(memory_store())
    first = lineage.records.put(1, 0, 1, 2, window_rows([1], [0]), None)
    assert lineage.records.put(1, 0, 1, 2, window_rows([1], [0]), None) == first
    with pytest.raises(DamagedObject, match="other content"):
        lineage.records.put(1, 0, 1, 2, window_rows([1], [1]), None)


def test_records_that_differ_from_their_reference_are_refused():
    lineage = Lineage(memory_store())
    ref = lineage.records.put(1, 0, 1, 2, window_rows([1], [0]), None)
    with pytest.raises(DamagedObject, match="digest"):
        lineage.records.read(dataclasses.replace(ref, digest="xxh3:" + "0" * 32))
    with pytest.raises(DamagedObject, match="bytes, not"):
        lineage.records.read(dataclasses.replace(ref, num_bytes=ref.num_bytes + 1))
    with pytest.raises(DamagedObject, match="is missing"):
        lineage.records.read(dataclasses.replace(ref, key=ref.key.replace("r00000000", "r00000001")))
    with pytest.raises(DamagedObject, match="none of theirs"):
        lineage.records.read(ObjectRef("job.json", 1, ref.digest))


def test_records_under_another_key_are_refused():
    data = encode_records(NAME, window_rows([1], [0]), step_rows([1]))
    with pytest.raises(DamagedObject, match="its header is"):
        decode_records("key", dataclasses.replace(NAME, rank=1), data)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("windows.weight"),
        lambda t: t.update({"windows.colour": np.zeros(1)}),
        lambda t: t.update({"windows.position": np.array([-1], np.int64)}),
        lambda t: t.update({"windows.position": np.array([0], np.int32)}),
        lambda t: t.update({"windows.position": np.array([0, 1], np.int64)}),
        lambda t: t.update({"windows.segment_window": np.array([1], np.int64)}),
        lambda t: t.update({"windows.length": np.array([0], np.int64)}),
        lambda t: t.update({"windows.offset": np.array([-1], np.int64)}),
        lambda t: t.update({"windows.step": np.array([3], np.int64)}),
        lambda t: t.update({"steps.step": np.array([0], np.int64)}),
    ],
)
def test_records_with_wrong_columns_are_refused(change):
    data = encode_records(NAME, window_rows([1], [0]), step_rows([1]))
    header = {"phalanx": '{"attempt":1,"first_step":1,"format":"phalanx.records/2","last_step":2,"rank":0}'}
    tensors = load(data)
    assert save(tensors, header) == data
    change(tensors)
    with pytest.raises(DamagedObject, match="holds no step records"):
        decode_records("key", NAME, save(tensors, header))


def test_records_cut_short_are_refused_at_every_length():
    data = encode_records(NAME, window_rows([1], [0]), step_rows([1]))
    for length in range(len(data)):
        with pytest.raises(DamagedObject):
            decode_records("key", NAME, data[:length])


def test_records_of_steps_outside_their_range_are_refused_when_written():
    with pytest.raises(ValueError, match="outside 1 to 2"):
        encode_records(NAME, window_rows([3], [0]), step_rows([1]))
    with pytest.raises(ValueError, match="no range"):
        Lineage(memory_store()).records.put(1, 0, 3, 2, None, None)


def test_windows_concatenated_keep_each_segment_with_its_window():
    joined = WindowRows.concatenate([window_rows([1, 1], [0, 1]), WindowRows.concatenate(()), window_rows([2], [2])])
    assert joined.segment_window.tolist() == [0, 1, 2]
    assert joined.position[joined.segment_window].tolist() == (joined.offset // 8).tolist() == [0, 1, 2]


def test_surplus_slot_as_a_window_row_is_refused():
    with pytest.raises(ValueError, match="surplus slots have no row"):
        window_rows([1], [-1])
