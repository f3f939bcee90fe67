"""What a job's storage holds at one moment, as far as it decides what stays: folders of checkpoints, attempts, damage.

Folders are looked at first and attempts afterwards. So an attempt whose folder was seen is always among the attempts,
and what is committed meanwhile is at worst not seen yet, which the rules of `collection` allow for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from phalanx.lineage import Attempt, CheckpointRef, DamagedObject, Lineage, Link, keys, live_chain
from phalanx.lineage.damage import damage_reports
from phalanx.objects import ObjectStore

_ATTEMPT_FOLDER = re.compile(r"a([0-9]{8})/")
_STEP_FOLDER = re.compile(r"a([0-9]{8})/s([0-9]{8})/")
_NUM_READERS = 8


@dataclass(frozen=True, slots=True)
class Folder:
    """What lies directly in the folder of a checkpoint."""

    has_manifest: bool
    has_retired: bool
    has_others: bool


@dataclass(frozen=True, slots=True)
class Survey:
    """One look. links: the live chain, oldest first. damaged: what cannot be restored, and why. world_sizes: of the
    checkpoints whose manifest can be read. stamp: keys of the attempts and journal entries that it follows from.
    """

    folders: Mapping[CheckpointRef, Folder]
    attempts: tuple[Attempt, ...]
    links: tuple[Link, ...]
    damaged: Mapping[CheckpointRef, str]
    world_sizes: Mapping[CheckpointRef, int]
    stamp: frozenset[str]

    @property
    def committed(self) -> frozenset[CheckpointRef]:
        """The checkpoints that exist."""
        return frozenset(ref for ref, folder in self.folders.items() if folder.has_manifest)


class Surveyor:
    """Looks at one job. A manifest that was read once is not read again: it cannot change, and what rots is found by
    whoever reads the checkpoint.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store, self._lineage = store, Lineage(store)
        self._world_sizes: dict[CheckpointRef, int] = {}

    def look(self) -> Survey:
        """Reads anew. Raises DamagedObject where attempts or live journal entries are not what they must be."""
        with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="survey") as pool:
            folders = self._folders(pool)
            stamp = self.stamp()
            attempts = self._lineage.attempts()
            known = {attempt.number for attempt in attempts}
            folders = {ref: folder for ref, folder in folders.items() if ref.attempt in known}
            damaged = damage_reports(self._lineage)
            committed = [ref for ref, folder in folders.items() if folder.has_manifest]
            for ref, why in zip(committed, pool.map(self._unreadable, committed), strict=True):
                if why is not None:
                    damaged.setdefault(ref, why)
        sizes = {ref: self._world_sizes[ref] for ref in committed if ref in self._world_sizes}
        return Survey(folders, attempts, live_chain(attempts), damaged, sizes, stamp)

    def stamp(self) -> frozenset[str]:
        """The keys from which chain and damage follow; another set means that decisions must be made anew."""
        return frozenset(info.key for prefix in (keys.ATTEMPTS, keys.JOURNAL) for info in self._store.list(prefix))

    def _folders(self, pool: ThreadPoolExecutor) -> dict[CheckpointRef, Folder]:
        attempts = [key for key in self._store.children("a") if _ATTEMPT_FOLDER.fullmatch(key)]
        inside = [key for found in pool.map(self._children, attempts) for key in found]
        steps = [(key, match) for key in inside if (match := _STEP_FOLDER.fullmatch(key))]
        refs = [CheckpointRef(int(match[1]), int(match[2])) for _, match in steps]
        contents = pool.map(lambda ref: frozenset(self._children(keys.checkpoint(ref))), refs)
        return {ref: _folder(ref, content) for ref, content in zip(refs, contents, strict=True)}

    def _children(self, prefix: str) -> list[str]:
        return list(self._store.children(prefix))

    def _unreadable(self, ref: CheckpointRef) -> str | None:
        """Why the manifest cannot be used, or None. One that vanishes meanwhile is not damage worth a word here."""
        if ref not in self._world_sizes:
            try:
                self._world_sizes[ref] = self._lineage.manifest(ref).world_size
            except DamagedObject as error:
                return str(error)
        return None


def _folder(ref: CheckpointRef, content: frozenset[str]) -> Folder:
    roots = {keys.manifest(ref), keys.retired(ref)}
    return Folder(keys.manifest(ref) in content, keys.retired(ref) in content, bool(content - roots))
