"""What a job's storage holds at one moment, as far as it decides what stays: folders of checkpoints, attempts, damage.

Folders are looked at first and attempts afterwards. So an attempt whose folder was seen is always among the attempts,
and what is committed meanwhile is at worst not seen yet, which the rules of `collection` allow for.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from phalanx.lineage import Attempt, CheckpointRef, DamagedObject, Lineage, Link, Manifest, ObjectRef, keys, live_chain
from phalanx.lineage.damage import damage_reports
from phalanx.objects import ObjectStore

_ATTEMPT_FOLDER = re.compile(r"a([0-9]{8})/")
_STEP_FOLDER = re.compile(r"a([0-9]{8})/s([0-9]{8})/")
_NUM_READERS = 8
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Folder:
    """What lies directly in the folder of a checkpoint."""

    has_manifest: bool
    has_retired: bool
    has_others: bool
    is_promoted: bool = False


@dataclass(frozen=True, slots=True)
class Root:
    """What decisions need of a manifest. records: those of rank 0, which writes down what the steps gave."""

    world_size: int
    speculative: bool
    metrics: Mapping[str, float]
    records: tuple[ObjectRef, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """One look. links: the live chain, oldest first. damaged: what cannot be restored, and why. roots: of the
    checkpoints whose manifest can be read. stamp: keys of the attempts and journal entries that it follows from.
    """

    folders: Mapping[CheckpointRef, Folder]
    attempts: tuple[Attempt, ...]
    links: tuple[Link, ...]
    damaged: Mapping[CheckpointRef, str]
    roots: Mapping[CheckpointRef, Root]
    stamp: frozenset[str]

    @property
    def committed(self) -> frozenset[CheckpointRef]:
        """The checkpoints that exist."""
        return frozenset(ref for ref, folder in self.folders.items() if folder.has_manifest)

    @property
    def world_sizes(self) -> Mapping[CheckpointRef, int]:
        """Ranks that saved each checkpoint whose manifest can be read."""
        return {ref: root.world_size for ref, root in self.roots.items()}

    @property
    def speculative(self) -> frozenset[CheckpointRef]:
        """The checkpoints that were taken between the regular ones."""
        return frozenset(ref for ref, root in self.roots.items() if root.speculative)

    @property
    def promoted(self) -> frozenset[CheckpointRef]:
        """The checkpoints that were found healthy."""
        return frozenset(ref for ref in self.committed if self.folders[ref].is_promoted)

    def recorded(self) -> tuple[CheckpointRef, ...]:
        """Those whose manifests name the records of the live chain, removed ones included, oldest first."""
        there = {ref for ref, folder in self.folders.items() if folder.has_manifest or folder.has_retired}
        links = {link.attempt.number: link for link in self.links}
        return tuple(sorted(ref for ref in there if ref.attempt in links and links[ref.attempt].has_step(ref.step)))


class Surveyor:
    """Looks at one job. A manifest that was read once is not read again: it cannot change, and what rots is found by
    whoever reads the checkpoint.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store, self._lineage = store, Lineage(store)
        self._roots: dict[CheckpointRef, Root] = {}

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
        roots = {ref: self._roots[ref] for ref in committed if ref in self._roots}
        return Survey(folders, attempts, live_chain(attempts), damaged, roots, stamp)

    def root(self, ref: CheckpointRef) -> Root:
        """What the manifest says, or said before it was retired. Raises DamagedObject."""
        if ref not in self._roots:
            self._roots[ref] = _root(self._lineage, self._lineage.retired(ref) or self._lineage.manifest(ref))
        return self._roots[ref]

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
        if ref not in self._roots:
            try:
                self._roots[ref] = _root(self._lineage, self._lineage.manifest(ref))
            except DamagedObject as error:
                return str(error)
        return None


def _folder(ref: CheckpointRef, content: frozenset[str]) -> Folder:
    roots = {keys.manifest(ref), keys.retired(ref), keys.promoted(ref)}
    has_manifest, has_retired = keys.manifest(ref) in content, keys.retired(ref) in content
    return Folder(has_manifest, has_retired, bool(content - roots), keys.promoted(ref) in content)


def _root(lineage: Lineage, manifest: Manifest) -> Root:
    return Root(manifest.world_size, manifest.speculative, dict(manifest.metrics), _first_records(lineage, manifest))


def _first_records(lineage: Lineage, manifest: Manifest) -> tuple[ObjectRef, ...]:
    """The records of rank 0, which are named first. Where a list of records is damaged the checkpoint can still be
    restored.
    """
    found: list[ObjectRef] = []
    try:
        for ref in lineage.records.refs_of(manifest):
            name = keys.records_name(ref.key)
            if name is None or name.rank != 0:
                break
            found.append(ref)
    except DamagedObject as error:
        _LOG.warning("the loss at checkpoint %s is not known: %s", manifest.ref, error)
    return tuple(found)
