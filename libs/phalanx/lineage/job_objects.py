"""The objects below a job's root as its lineage reads and writes them: created once, recognised by their bytes after a
lost reply, verified against what names them.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.core.digest import xxh3
from phalanx.lineage.encoding import Stored, decode
from phalanx.lineage.errors import DamagedObject
from phalanx.lineage.values import ObjectRef
from phalanx.objects import ObjectExists, ObjectMissing, ObjectStore


class JobObjects:
    """Those below the root `store`. Every method may raise what the store raises; each that reads raises DamagedObject
    for an object that is missing, or not what its key says.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def read_bytes(self, key: str) -> bytes:
        """All of an object that must be there."""
        try:
            return self.store.read(key)
        except ObjectMissing as error:
            raise DamagedObject(key, "is missing") from error

    def read(self, kind: type[Stored], key: str) -> Stored:
        """What an object that must be there says."""
        return decode(kind, key, self.read_bytes(key))

    def read_verified(self, ref: ObjectRef) -> bytes:
        """The bytes of an object that another names. Raises DamagedObject unless size and digest are those of `ref`."""
        data = self.read_bytes(ref.key)
        if len(data) != ref.num_bytes:
            raise DamagedObject(ref.key, f"has {len(data)} bytes, not {ref.num_bytes}")
        if xxh3(data) != ref.digest:
            raise DamagedObject(ref.key, f"is damaged: its bytes do not have the digest {ref.digest}")
        return data

    def created(self, key: str, data: bytes) -> bool:
        """Creates the object; False if another's is there, True if it is there and ours (a lost reply)."""
        try:
            self.store.create(key, data)
        except ObjectExists:
            return self.read_bytes(key) == data
        return True

    def create_once(self, key: str, data: bytes) -> None:
        """Creates the object; DamagedObject where other content is there."""
        if not self.created(key, data):
            raise DamagedObject(key, "is there with other content; an attempt writes each object once")

    def numbers(self, prefix: str, number_of: Callable[[str], int | None]) -> tuple[int, ...]:
        """Numbers of the objects below `prefix`, which must be 1, 2, 3, ... as they were created."""
        numbers: list[int] = []
        for info in self.store.list(prefix):
            number = number_of(info.key)
            if number is None:
                raise DamagedObject(info.key, f"is foreign: Phalanx writes nothing of that name below {prefix}")
            if number != len(numbers) + 1:
                raise DamagedObject(info.key, f"has a gap before it: the one numbered {len(numbers) + 1} is missing")
            numbers.append(number)
        return tuple(numbers)
