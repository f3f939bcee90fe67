"""What a node keeps in memory: shares come in piece by piece, count once they are whole, and go when they may."""

from __future__ import annotations

import threading

import pytest

from phalanx.agent.replicas import ReplicaMemory, share_digest
from phalanx.core.digest import xxh3
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, ObjectRef
from phalanx.snapshot.replicas import Copy

FIRST, SECOND, THIRD = (CheckpointRef(1, step) for step in (5, 10, 15))
OWNERS = ("a", "d")


def contents(ref, owner, num_objects=2, num_bytes=1000):
    return {
        f"a1/s{ref.step}/objects/{owner}-{at}": bytes([ref.step + at]) * (num_bytes + at) for at in range(num_objects)
    }


def refs(objects):
    return [ObjectRef(key, len(data), xxh3(data)) for key, data in objects.items()]


def put(memory, ref, owner, piece=300):
    objects = contents(ref, owner)
    assert memory.begin(ref, owner, refs(objects))
    for key, data in objects.items():
        for at in range(0, len(data), piece):
            memory.write(ref, owner, key, at, data[at : at + piece])
    memory.finish(ref, owner)
    return objects


@pytest.fixture
def memory():
    return ReplicaMemory(OWNERS, 1 << 20)


def holds(memory, ref, owner):
    """Whether all of a share is read as it was sent."""
    return all(memory.read(ref, key, 0, len(data)) == data for key, data in contents(ref, owner).items())


def test_share_that_came_whole_is_read_and_told(memory):
    objects = put(memory, FIRST, "a")
    assert holds(memory, FIRST, "a")
    key, data = next(iter(objects.items()))
    assert memory.read(FIRST, key, 7, 11) == data[7:18]
    assert memory.copies("a") == {FIRST: {Copy("a", "a", share_digest(refs(objects)))}}
    assert memory.shelf.vote is None
    put(memory, FIRST, "d")
    assert memory.shelf.vote == FIRST
    assert not memory.begin(FIRST, "a", refs(objects)), "it is here already"
    memory.finish(FIRST, "a")


def test_share_that_comes_in_is_neither_read_nor_told(memory):
    objects = contents(FIRST, "a")
    memory.begin(FIRST, "a", refs(objects))
    with pytest.raises(OutsideError, match="not kept here"):
        memory.read(FIRST, next(iter(objects)), 0, 1)
    assert memory.copies("a") == {}


def test_share_with_a_wrong_or_missing_byte_is_dropped_and_the_sealed_step_stays(memory):
    for owner in OWNERS:
        put(memory, FIRST, owner)
    memory.seal(FIRST)
    objects = contents(SECOND, "a")
    memory.begin(SECOND, "a", refs(objects))
    (key, data), *_ = objects.items()
    memory.write(SECOND, "a", key, 0, data[:-1])
    with pytest.raises(OutsideError, match="did not come whole"):
        memory.finish(SECOND, "a")
    assert memory.copies("a").keys() == {FIRST} and holds(memory, FIRST, "a") and holds(memory, FIRST, "d")
    put(memory, SECOND, "a")
    assert holds(memory, SECOND, "a"), "sent again it is taken"


def test_sealed_step_leaves_with_the_next_one_sealed_and_not_before(memory):
    for owner in OWNERS:
        put(memory, FIRST, owner)
    memory.seal(FIRST)
    one_step = memory.num_bytes
    for owner in OWNERS:
        put(memory, SECOND, owner)
        assert holds(memory, FIRST, "a") and holds(memory, FIRST, "d")
    assert memory.num_bytes == 2 * one_step
    with pytest.raises(PhalanxError, match="whether that one is sealed"):
        put(memory, THIRD, "a")
    memory.seal(SECOND)
    assert memory.num_bytes == one_step and memory.copies("a").keys() == {SECOND}
    with pytest.raises(OutsideError):
        holds(memory, FIRST, "a")


def test_step_that_is_given_up_leaves(memory):
    for owner in OWNERS:
        put(memory, FIRST, owner)
    memory.give_up(FIRST)
    assert memory.num_bytes == 0 and memory.copies("a") == {}


def test_share_beyond_the_limit_is_refused_before_its_first_byte(memory):
    big = [ObjectRef("a1/s5/objects/a-0", 1 << 20, xxh3(b""))]
    put(memory, FIRST, "d")
    before = memory.num_bytes
    with pytest.raises(OutsideError, match="no room"):
        memory.begin(FIRST, "a", big)
    assert memory.num_bytes == before and holds(memory, FIRST, "d")


def test_bytes_outside_of_what_was_announced_are_refused(memory):
    objects = contents(FIRST, "a")
    memory.begin(FIRST, "a", refs(objects))
    key, data = next(iter(objects.items()))
    for bad_key, offset, piece in (
        ("other", 0, b"x"),
        (key, len(data), b"x"),
        (key, -1, b"x"),
        (key, 1, data),
    ):
        with pytest.raises(PhalanxError, match="announced"):
            memory.write(FIRST, "a", bad_key, offset, piece)
    with pytest.raises(PhalanxError, match="a share of a, d"):
        memory.begin(FIRST, "b", refs(objects))
    with pytest.raises(PhalanxError, match="begun to come in"):
        memory.write(FIRST, "d", key, 0, b"x")


def test_share_is_finished_by_one_of_many_who_say_so_at_once(memory):
    objects = contents(FIRST, "a")
    memory.begin(FIRST, "a", refs(objects))
    for key, data in objects.items():
        memory.write(FIRST, "a", key, 0, data)
    refused = []

    def finish():
        try:
            memory.finish(FIRST, "a")
        except PhalanxError as error:
            refused.append(error)

    threads = [threading.Thread(target=finish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert holds(memory, FIRST, "a") and len(refused) < 8
