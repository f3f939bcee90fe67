"""Registered datasets as values, and what a registration must satisfy; pure. The JSON of a version is its truth: one
object `registry/datasets/<name>/<n>.json` below the cluster's root, created once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from phalanx.core.digest import digest_of
from phalanx.core.errors import PhalanxError
from phalanx.core.numbering import numbered
from phalanx.lineage import DamagedObject
from phalanx.lineage.documents import decode_document, encode_document

if TYPE_CHECKING:
    from phalanx.stream.manifest import Split

PREFIX: Final = "registry/datasets/"
SPLITS: Final = ("train", "held_out")
DEFAULT_PAGE, LARGEST_PAGE = 100, 1000
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_KEY = re.compile(r"registry/datasets/([a-z0-9][a-z0-9._-]{0,127})/([0-9]{8})\.json")
_MAX_REQUEST_ID = 200


@dataclass(frozen=True, slots=True)
class DatasetSplit:
    """One split. url: the folder of its manifest; digest: of the manifest; num_bytes: of all tars."""

    name: str
    url: str
    digest: str
    num_documents: int
    num_tokens: int
    num_shards: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DatasetParent:
    """A registered version from which another was made. digest: of its content."""

    dataset: str
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class DatasetVersion:
    """One registered state of a dataset; `train` is its first split. create_time: RFC 3339, for people only. parents:
    what it was made from, as whoever registered it said. input_digest: of what it was prepared or imported from ("":
    its manifest says none). recipe_digest: of the recipe of `train`.
    """

    dataset: str
    version: int
    splits: tuple[DatasetSplit, ...]
    tokenizer_digest: str
    vocab_size: int
    create_time: str
    owner: str
    request_id: str
    parents: tuple[DatasetParent, ...]
    input_digest: str
    recipe_digest: str

    @property
    def url(self) -> str:
        """The folder above its splits."""
        return self.splits[0].url.rpartition("/")[0]

    @property
    def digest(self) -> str:
        """Of the manifests of all splits: what the data is, wherever it lies."""
        return content_digest(self.splits)

    @property
    def key(self) -> str:
        """Where it lies below the cluster's root."""
        return key_of(self.dataset, self.version)

    def encode(self) -> bytes:
        """The bytes of its object."""
        return encode_document(self)


def content_digest(splits: Sequence[DatasetSplit]) -> str:
    """Digest over the manifests' digests by split."""
    return digest_of({split.name: split.digest for split in splits})


def prefix_of(dataset: str) -> str:
    """What the keys of a dataset's versions begin with."""
    return f"{PREFIX}{dataset}/"


def key_of(dataset: str, version: int) -> str:
    """Key of a version below the cluster's root."""
    return f"{prefix_of(dataset)}{version:08d}.json"


def place_of(key: str) -> tuple[str, int] | None:
    """Dataset and version of an object in the registry, or None for a key that is none."""
    match = _KEY.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def decode(key: str, data: bytes) -> DatasetVersion:
    """The version stored at `key`; raises DamagedObject for bytes that `encode` would not write there."""
    version = decode_document(DatasetVersion, key, data)
    if version.key != key or not version.splits or version.splits[0].name != "train":
        raise DamagedObject(key, f"says that it is version {version.version} of {version.dataset}")
    return version


def check_request(request_id: str, dataset: str) -> None:
    """Raises PhalanxError for a request that names neither itself nor a dataset."""
    check_request_id(request_id)
    check_name(dataset)


def check_request_id(request_id: str) -> None:
    """Raises PhalanxError for what can't be a request id."""
    if not 0 < len(request_id) <= _MAX_REQUEST_ID or not request_id.isprintable():
        raise PhalanxError(
            "request_id",
            value=request_id[:_MAX_REQUEST_ID],
            expected=f"from 1 to {_MAX_REQUEST_ID} printable characters",
            remedy="choose a fresh one for each request, such as a UUID",
        )


def check_name(dataset: str) -> None:
    """Raises PhalanxError for what can't be the name of a dataset."""
    if not _NAME.fullmatch(dataset):
        raise PhalanxError(
            "dataset",
            value=dataset[:200],
            expected="a name of lower case letters, digits, dots, hyphens and underscores that begins with a letter "
            "or digit, at most 128 long",
            remedy="choose such a name",
        )


def check_url(url: str) -> None:
    """Raises PhalanxError for a URL that means another folder in each process."""
    if url.startswith(("file://./", "file://../", "file://~")):
        raise PhalanxError(
            "url",
            value=url,
            expected="file:///absolute/folder",
            remedy="the service runs elsewhere: write the whole path",
        )


def split_facts(name: str, split: Split) -> DatasetSplit:
    """What the catalog keeps of a manifest."""
    return DatasetSplit(
        name=name,
        url=split.url,
        digest=split.digest,
        num_documents=split.num_documents,
        num_tokens=split.num_tokens,
        num_shards=split.num_shards,
        num_bytes=split.num_bytes,
    )


def check_splits(splits: Mapping[str, Split]) -> None:
    """Raises PhalanxError unless each split is of its kind and all have one tokenizer. splits: by name."""
    train = splits["train"]
    for name, split in splits.items():
        is_held_out = name == "held_out"
        if split.is_held_out != is_held_out:
            kinds = {False: "a split to train on", True: "a split that was held out for evaluation"}
            raise PhalanxError(
                split.url, value=kinds[not is_held_out], expected=kinds[is_held_out], remedy="prepare the dataset again"
            )
        if (split.tokenizer_digest, split.vocab_size, split.eos_id) != (
            train.tokenizer_digest,
            train.vocab_size,
            train.eos_id,
        ):
            raise PhalanxError(
                split.url,
                value=split.tokenizer_digest,
                expected=f"the tokenizer of {train.url}, {train.tokenizer_digest}",
                remedy="prepare both splits with one tokenizer",
            )


def reference_of(text: str) -> tuple[str, int | None]:
    """Dataset and version of `NAME@VERSION`, or of `NAME` (no version); raises PhalanxError."""
    name, at, number = text.partition("@")
    check_name(name)
    if at and not numbered(number):
        raise PhalanxError(
            "version", value=text, expected="NAME@VERSION with a number from 1", remedy="`phalanx data catalog NAME`"
        )
    return name, int(number) if at else None


@dataclass(frozen=True, slots=True)
class Filter:
    """Which versions a list shows; "" lets everything pass. digest: of content, a split, the tokenizer, the input or
    the recipe. made_from: `NAME` or `NAME@VERSION`.
    """

    name_prefix: str = ""
    digest: str = ""
    owner: str = ""
    made_from: str = ""

    @property
    def wants_all_versions(self) -> bool:
        """Whether more than the newest version of a dataset may pass."""
        return bool(self.digest or self.owner or self.made_from)

    def passes(self, version: DatasetVersion) -> bool:
        """Whether a version is shown; raises PhalanxError for a filter that can't be."""
        if not version.dataset.startswith(self.name_prefix) or (self.owner and version.owner != self.owner):
            return False
        if self.digest and self.digest not in _digests(version):
            return False
        return not self.made_from or self._is_parent(version)

    def _is_parent(self, version: DatasetVersion) -> bool:
        name, number = reference_of(self.made_from)
        return any(each.dataset == name and number in (None, each.version) for each in version.parents)


def _digests(version: DatasetVersion) -> frozenset[str]:
    own = (version.digest, version.tokenizer_digest, version.input_digest, version.recipe_digest)
    return frozenset(own) | {split.digest for split in version.splits}


def input_digest_of(split: Split) -> str:
    """What the recipe of a split says of its input, "" where it says nothing."""
    found = split.recipe.get("input_digest", "")
    return found if isinstance(found, str) else ""


def page_size(asked: int) -> int:
    """Datasets a page; raises PhalanxError."""
    if not 0 <= asked <= LARGEST_PAGE:
        raise PhalanxError(
            "page_size", value=asked, expected=f"from 0 to {LARGEST_PAGE}", remedy=f"0 means {DEFAULT_PAGE}"
        )
    return asked or DEFAULT_PAGE
