"""Which replica writes what: a pure function of a box and its number of holders, so that ranks agree without speaking.

A box that several ranks hold alike is written once. From 1 MiB a replica on, it is cut along its first axis into as
many pieces as there are replicas, and each writes its own: bytes are balanced whatever the sizes of the tensors. A
smaller box goes whole to one replica, chosen by a hash of name and box, as is the replica that begins.
"""

from __future__ import annotations

import xxhash

from phalanx.core.box import Box

MIN_PIECE_BYTES = 1 << 20


def owned_box(name: str, box: Box, itemsize: int, replica: int, num_replicas: int) -> Box | None:
    """The part of `box` (global indices) that this replica writes, or None. Over all replicas the parts tile the box
    exactly once.
    """
    assert 0 <= replica < num_replicas, (name, replica, num_replicas)
    if num_replicas == 1:
        return box
    first = xxhash.xxh3_64_intdigest(f"{name}|{box.offset}|{box.shape}".encode()) % num_replicas
    turn = (replica - first) % num_replicas
    axis = next((d for d, n in enumerate(box.shape) if n > 1), None)
    pieces = (
        1
        if axis is None
        else max(1, min(num_replicas, box.shape[axis], box.num_elements * itemsize // MIN_PIECE_BYTES))
    )
    if turn >= pieces:
        return None
    return box if axis is None or pieces == 1 else _piece(box, axis, turn, pieces)


def _piece(box: Box, axis: int, turn: int, pieces: int) -> Box:
    """Piece number `turn` of `pieces` nearly equal ones along `axis`."""
    size = box.shape[axis]
    start, stop = size * turn // pieces, size * (turn + 1) // pieces
    offset, shape = list(box.offset), list(box.shape)
    offset[axis], shape[axis] = offset[axis] + start, stop - start
    return Box(tuple(offset), tuple(shape))
