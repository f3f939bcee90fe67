"""Strict reading: whatever is not the very bytes that were written is refused, and the message names the key and the
reason.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lineage_kit import CODE, IDENTITY, a_manifest, an_attempt

from phalanx.core.digest import canonical_json, digest_of
from phalanx.lineage import Attempt, CheckpointRef, DamagedObject, JobRecord, JournalEntry, Manifest, ObjectRef
from phalanx.lineage.encoding import decode, encode

VALUES = [
    JobRecord("request-1", {"training": {"steps": 40}, "axes": ["pp"]}, {"model.dim": 64}, IDENTITY),
    an_attempt(2, CheckpointRef(1, 5), ((1, 3),)),
    an_attempt(1),
    JournalEntry(2, 1, "damage", 160, {"windows": [3, 4]}, "request-2"),
    a_manifest(2, 10, (ObjectRef("a00000002/records/x", 12, CODE),)),
]


def enveloped(content: dict, form: str = "phalanx.manifest/1") -> bytes:
    return canonical_json({"format": form, "digest": digest_of(content), "content": content})


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_stored_value_reads_back_equal(value):
    assert decode(type(value), "key", encode(value)) == value


@given(st.data())
def test_stored_value_with_any_byte_changed_is_refused(data):
    value = data.draw(st.sampled_from(VALUES))
    stored = bytearray(encode(value))
    index = data.draw(st.integers(0, len(stored) - 1))
    stored[index] = data.draw(st.integers(0, 255).filter(lambda byte: byte != stored[index]))
    with pytest.raises(DamagedObject, match="object some/key "):
        decode(type(value), "some/key", bytes(stored))


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_stored_value_cut_short_is_refused(cut):
    with pytest.raises(DamagedObject, match="is not JSON"):
        decode(Attempt, "key", encode(an_attempt(1))[:cut])


def content_of(value: object) -> dict:
    return json.loads(encode(value))["content"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step": -1}, "wrong field step"),
        ({"step": "10"}, "wrong field step"),
        ({"step": True}, "wrong field step"),
        ({"loader": {"step": 10}}, "wrong field loader.position"),
        ({"parts": [{"key": "k", "num_bytes": 1, "digest": "md5:00"}]}, "wrong field parts.0.digest"),
        ({"colour": "red"}, "one byte form"),
        ({"schedule": {"loss_scale": "1"}}, "wrong field schedule.loss_scale"),
    ],
)
def test_manifest_with_a_wrong_field_is_refused_by_its_name(change, reason):
    with pytest.raises(DamagedObject, match=reason):
        decode(Manifest, "key", enveloped(content_of(a_manifest(2, 10)) | change))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[]", "is not an object of Phalanx"),
        (b"{}", "is not an object of Phalanx"),
        (b"\x80\x04pickle", "is not JSON"),
        (b'{"format":NaN}', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"format":"phalanx.manifest/1","digest":"x","content":{"a":"\\ud800"}}', "is damaged"),
        (enveloped(content_of(a_manifest(2, 10)), "phalanx.manifest/2"), "this version reads 'phalanx.manifest/1'"),
        (json.dumps(json.loads(encode(a_manifest(2, 10)))).encode(), "one byte form"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_foreign_object_is_refused_with_the_reason(data, reason):
    with pytest.raises(DamagedObject, match=reason):
        decode(Manifest, "key", data)


def test_damaged_object_below_a_checkpoint_names_the_checkpoint_to_avoid():
    assert DamagedObject("a00000002/s00000010/parts/00000001.json", "is missing").checkpoint == CheckpointRef(2, 10)
    assert DamagedObject("attempts/00000001.json", "is missing").checkpoint is None


def test_manifest_without_metrics_is_stored_as_before_there_were_any_and_with_them_it_comes_back():
    plain = a_manifest(2, 10)
    assert b"speculative" not in encode(plain) and b"metrics" not in encode(plain)
    told = replace(plain, speculative=True, metrics={"validation_loss": 2.5})
    assert decode(Manifest, "key", encode(told)) == told
    content = json.loads(encode(plain))["content"] | {"speculative": False}
    with pytest.raises(DamagedObject, match="one byte form"):
        decode(Manifest, "key", enveloped(content))
