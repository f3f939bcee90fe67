"""Registers dataset versions: manifests are looked at, one create-only object makes the version exist, the database
follows.

Killed before the object is there, nothing happened; killed after it, the version exists, and whoever asks again with
the same request id gets it. Several services on one registry only race for the next number.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from phalanx.core.digest import digest_of
from phalanx.core.errors import PhalanxError
from phalanx.data.catalog import FoundSplit
from phalanx.data.datasets import (
    PREFIX,
    SPLITS,
    DatasetParent,
    DatasetSplit,
    DatasetVersion,
    Filter,
    check_name,
    check_request,
    check_splits,
    check_url,
    content_digest,
    decode,
    input_digest_of,
    page_size,
    place_of,
    prefix_of,
    reference_of,
    split_facts,
)
from phalanx.data.presence import require_objects
from phalanx.data.store import CatalogStore
from phalanx.data.verification import verify_tokenizers
from phalanx.lineage import DamagedObject
from phalanx.objects import ObjectExists, ObjectMissing, ObjectStore, StorageSettings, open_store
from phalanx.rpc.errors import AlreadyExists, NotFound
from phalanx.stream.manifest import MANIFEST_KEY, Split, has_manifest, open_split

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the catalog. next_token: "" at the end."""

    versions: tuple[DatasetVersion, ...]
    next_token: str


class Catalog:
    """Every registered dataset. registry: the store at the cluster's root; settings: how the buckets of datasets are
    reached.
    """

    def __init__(self, registry: ObjectStore, database: CatalogStore, settings: StorageSettings | None = None) -> None:
        self._registry, self._database, self._settings = registry, database, settings
        self._lock = threading.Lock()

    def rebuild(self) -> None:
        """Makes the database what storage is. An object that can't be read is left out, loudly."""
        self._follow(PREFIX, self._database.places())

    def register(
        self, request_id: str, dataset: str, url: str, owner: str, made_from: Sequence[str] = ()
    ) -> DatasetVersion:
        """The version with the data at `url`; the one that is there where the request, or the data, was registered
        before. made_from: registered versions, each as `NAME@VERSION`.

        Raises AlreadyExists for a request id that was used for something else, NotFound for a version to be made from
        that is not there, PhalanxError for data that is not what `data prepare` writes.
        """
        check_request(request_id, dataset)
        check_url(url)
        root = open_store(url, self._settings)
        known = self._known(request_id, dataset, root.url)
        if known is not None:
            return known
        parents = tuple(dict.fromkeys(self._parent(each) for each in made_from))
        splits = self._splits(root)
        with self._lock:
            return self._create(request_id, dataset, root.url, splits, owner, parents)

    def versions(self, dataset: str) -> tuple[DatasetVersion, ...]:
        """All versions, oldest first; raises NotFound."""
        check_name(dataset)
        found = self._database.versions(dataset)
        if not found:
            raise NotFound(
                "dataset", value=dataset, expected="one that is registered", remedy="`phalanx data register NAME URL`"
            )
        return found

    def page(self, size: int, token: str, wanted: Filter = Filter()) -> Page:  # noqa: B008 - frozen
        """The newest version of each dataset, by name, or all versions that pass `wanted` where it asks for more than
        names, behind the page that gave `token` ("" for the first); raises PhalanxError.
        """
        limit = page_size(size)
        name, number = reference_of(token) if token else ("", None)
        after = name, number or 0
        if wanted.made_from:
            reference_of(wanted.made_from)
        found = list(islice(filter(wanted.passes, self._database.listed(after, wanted, limit + 1)), limit + 1))
        shown = tuple(found[:limit])
        return Page(shown, f"{shown[-1].dataset}@{shown[-1].version}" if len(found) > limit else "")

    def _parent(self, reference: str) -> DatasetParent:
        name, number = reference_of(reference)
        found = next((each for each in self._database.versions(name) if each.version == number), None)
        if found is None:
            raise NotFound(
                "made_from",
                value=reference,
                expected="a registered version, NAME@VERSION",
                remedy="`phalanx data catalog NAME` lists them",
            )
        return DatasetParent(found.dataset, found.version, found.digest)

    def _known(self, request_id: str, dataset: str, url: str) -> DatasetVersion | None:
        found = self._database.by_request(request_id)
        if found is not None and (found.dataset, found.url) != (dataset, url.rstrip("/")):
            raise AlreadyExists(
                "request_id",
                value=request_id,
                expected=f"a fresh one: it registered {found.dataset} version {found.version} from {found.url}",
                remedy="choose another request id",
            )
        return found

    def _create(
        self,
        request_id: str,
        dataset: str,
        url: str,
        splits: Mapping[str, Split],
        owner: str,
        parents: tuple[DatasetParent, ...],
    ) -> DatasetVersion:
        """Takes the next number. Others may take it first: then what they registered is looked at too."""
        facts = tuple(split_facts(name, split) for name, split in splits.items())
        train = splits["train"]
        while True:
            last = self._follow(prefix_of(dataset), self._database.places(dataset))
            known = self._known(request_id, dataset, url) or self._same_data(dataset, facts)
            if known is not None:
                return known
            version = DatasetVersion(
                dataset=dataset,
                version=last + 1,
                splits=facts,
                tokenizer_digest=train.tokenizer_digest,
                vocab_size=train.vocab_size,
                create_time=datetime.now(UTC).isoformat(timespec="milliseconds"),
                owner=owner,
                request_id=request_id,
                parents=parents,
                input_digest=input_digest_of(train),
                recipe_digest=digest_of(train.recipe),
            )
            try:
                self._registry.create(version.key, version.encode())
            except ObjectExists:
                continue
            self._database.add([version])
            return version

    def _same_data(self, dataset: str, facts: tuple[DatasetSplit, ...]) -> DatasetVersion | None:
        return self._database.by_digest(dataset, content_digest(facts))

    def _splits(self, root: ObjectStore) -> dict[str, Split]:
        """The splits below a folder, checked."""
        found = {name: root.within(name) for name in SPLITS if has_manifest(root.within(name))}
        if "train" not in found:
            raise PhalanxError(
                root.url,
                expected=f"a dataset: a folder that holds train/{MANIFEST_KEY}",
                remedy="name the folder that `phalanx data prepare INPUT --out URL` wrote",
            )
        splits = {name: open_split(store) for name, store in found.items()}
        check_splits(splits)
        named = [FoundSplit(name, found[name], split) for name, split in splits.items()]
        for folder, damage in verify_tokenizers(root, named, self._settings):
            raise PhalanxError(
                f"{root.url}/{folder}".rstrip("/"),
                expected=f"the tokenizer with which it was prepared ({damage})",
                remedy="bring the file back, or prepare the dataset again",
            )
        for name, split in splits.items():
            require_objects(found[name], split)
        return splits

    def _follow(self, prefix: str, held: frozenset[tuple[str, int]]) -> int:
        """Brings the database up to storage below `prefix`; the highest number there."""
        listed = {place: info.key for info in self._registry.list(prefix) if (place := place_of(info.key)) is not None}
        new = (self._read(key) for place, key in listed.items() if place not in held)
        self._database.add(version for version in new if version is not None)
        self._database.remove(held - listed.keys())
        return max((number for _, number in listed), default=0)

    def _read(self, key: str) -> DatasetVersion | None:
        try:
            return decode(key, self._registry.read(key))
        except (DamagedObject, ObjectMissing) as error:
            _LOG.error("left out of the catalog: %s/%s: %s", self._registry.url, key, error)
            return None
