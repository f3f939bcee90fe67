"""Copies a checkpoint of one job under another, from which that one begins.

The copy is the first attempt of the new job, which trains nothing: the same tensor objects, byte for byte, verified
while they are copied; parts that name them where they lie now; a manifest under the new job's identity, with the
loader and the schedules as they stood. Its step records stay with the origin, whose they are.

Everything is created once, the manifest last. Killed anywhere and run again it takes up what is there and gives the
same; until the manifest is there, no attempt of the new job can be opened.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import xxhash

from phalanx.lineage import CheckpointRef, DamagedObject, ForkPoint, Lineage, Manifest, ObjectRef, journal_digest, keys
from phalanx.lineage.leases import leased
from phalanx.objects import ObjectExists, ObjectMissing, ObjectStore
from phalanx.snapshot.commit import root_of
from phalanx.snapshot.errors import DamagedCheckpoint
from phalanx.snapshot.index import NUM_READERS, read_parts
from phalanx.snapshot.parts import Part, StoredObject, part_bytes
from phalanx.snapshot.tally import Tally

IMPORT_ATTEMPT = 1
PIECE_BYTES = 8 << 20


def imported(lineage: Lineage, origin: ForkPoint) -> bool:
    """Whether the copy is, or once was, whole: retention may have removed it since."""
    ref = _ref(origin)
    if any(attempt.number > IMPORT_ATTEMPT for attempt in lineage.attempts()) or lineage.retired(ref) is not None:
        return True
    return ref in lineage.checkpoints()


def import_checkpoint(
    source: ObjectStore, target: ObjectStore, origin: ForkPoint, *, code_digest: str, identity_digest: str
) -> None:
    """Makes the checkpoint of `origin` the first one of the job at `target`; does nothing where that is done.

    source: rooted at the origin's job, as `target` is at the new one. Raises DamagedCheckpoint (of the origin) where a
    byte is not what its manifest says, PhalanxError where the job at `target` has begun in another way.
    """
    lineage = Lineage(target)
    lineage.open_import(origin, code_digest=code_digest, identity_digest=identity_digest)
    if imported(lineage, origin):
        return
    copied = CheckpointRef(origin.attempt, origin.step)
    with leased(source, copied, "fork"):
        manifest, refs, tally = _copied(source, copied, target, _ref(origin))
    lineage.commit(root_of(lineage, _manifest(manifest, _ref(origin), identity_digest), refs, (), tally))


def _copied(
    source: ObjectStore, ref: CheckpointRef, target: ObjectStore, to: CheckpointRef
) -> tuple[Manifest, list[ObjectRef], Tally]:
    """All objects and parts of a checkpoint, copied under `to`: its manifest, the new parts, and what they hold."""
    manifest, lineage = Lineage(source).manifest(ref), Lineage(target)
    refs: list[ObjectRef] = []
    tally = Tally()
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for part in read_parts(source, tuple(Lineage(source).part_refs(manifest))):
            moves = [(item, _moved(item.key, to)) for item in part.objects]
            list(pool.map(lambda move: _copy(source, move[0], target, move[1]), moves))
            refs.append(_put_part(lineage, _moved_part(part, to), to))
            tally.add(part)
    return manifest, refs, tally


def _ref(origin: ForkPoint) -> CheckpointRef:
    return CheckpointRef(IMPORT_ATTEMPT, origin.step)


def _moved(key: str, to: CheckpointRef) -> str:
    """Where an object of the origin's checkpoint lies in the copy."""
    return f"{keys.objects(to)}{key.rpartition('/')[2]}"


def _moved_part(part: Part, to: CheckpointRef) -> Part:
    objects = tuple(dataclasses.replace(item, key=_moved(item.key, to)) for item in part.objects)
    boxes = tuple(dataclasses.replace(box, key=_moved(box.key, to)) for box in part.boxes)
    return dataclasses.replace(part, attempt=to.attempt, objects=objects, boxes=boxes, records=())


def _manifest(manifest: Manifest, to: CheckpointRef, identity_digest: str) -> Manifest:
    return dataclasses.replace(
        manifest,
        attempt=to.attempt,
        identity_digest=identity_digest,
        journal_digest=journal_digest(()),
        speculative=False,  # where a job begins is none of its speculations
        records=(),
        parts=(),
        part_lists=(),
        record_lists=(),
        directory=None,
    )


def _copy(source: ObjectStore, item: StoredObject, target: ObjectStore, key: str) -> None:
    """One object, in pieces; nothing is there under `key` before every byte has been verified."""
    if _is_there(target, key, item.num_bytes):
        return
    digest = xxhash.xxh3_128()
    with target.writer(key) as writer:
        for offset in range(0, item.num_bytes, PIECE_BYTES):
            piece = _piece(source, item, offset)
            digest.update(piece)
            writer.write(piece)
        if f"xxh3:{digest.hexdigest()}" != item.digest:
            raise DamagedCheckpoint(item.key, f"its bytes do not have the digest {item.digest}")
        try:
            writer.commit()
        except ObjectExists:
            _is_there(target, key, item.num_bytes)  # another copier was faster


def _piece(source: ObjectStore, item: StoredObject, offset: int) -> bytes:
    try:
        return source.read(item.key, offset, min(PIECE_BYTES, item.num_bytes - offset))
    except ObjectMissing as error:
        raise DamagedCheckpoint(item.key, "is missing") from error


def _is_there(target: ObjectStore, key: str, num_bytes: int) -> bool:
    """Whether the copy exists: an object is whole or absent, and only verified bytes are ever put there."""
    try:
        found = target.info(key).num_bytes
    except ObjectMissing:
        return False
    if found != num_bytes:
        raise DamagedObject(key, f"has {found} bytes, not the {num_bytes} of the checkpoint that is copied")
    return True


def _put_part(lineage: Lineage, part: Part, to: CheckpointRef) -> ObjectRef:
    return lineage.put(keys.part(to, part.rank), part_bytes(part))
