"""A checkpoint as plain numpy arrays, for notebooks and tools: no torch, no job file, one URL.

`load` gives the tensors, `opened` a mapping that reads each when it is asked for. Both keep retention off the
checkpoint while they read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

import numpy as np

from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.lineage.leases import leased
from phalanx.objects import ObjectStore, StorageSettings, open_store
from phalanx.snapshot.arguments import names_of, step_of
from phalanx.snapshot.dtypes import bfloat16_to_float32
from phalanx.snapshot.fetch import read_tensor
from phalanx.snapshot.index import Index, StoredTensor
from phalanx.snapshot.lookup import Lookup


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of a checkpoint by name; each is read, whole and verified, whenever it is asked for. Where they lie
    is kept and nothing else, so memory is about two of the tensor that is read.

    Asking raises KeyError for a name that is not there, DamagedCheckpoint where stored bytes are wrong, PhalanxError
    once the block of `opened` has ended: from then on retention may remove the checkpoint.
    """

    def __init__(self, store: ObjectStore, ref: CheckpointRef, lookup: Lookup) -> None:
        self._store, self.ref, self._lookup = store, ref, lookup
        self._ended = False

    def __getitem__(self, name: str) -> np.ndarray:
        index = self._look([name])
        values = read_tensor(self._store, index, index.tensors[name])
        return bfloat16_to_float32(values) if index.tensors[name].dtype == "bfloat16" else values

    def __iter__(self) -> Iterator[str]:
        return iter(self._lookup.names)

    def __len__(self) -> int:
        return len(self._lookup.names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._lookup.has(name)

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of checkpoint {self.ref}>"

    def stored(self, name: str) -> StoredTensor:
        """How the tensor is stored (type, shape, boxes); nothing of its values is read."""
        return self._look([name]).tensors[name]

    def find(self, names: Iterable[str]) -> None:
        """Finds out at once where these tensors lie; otherwise that is done for each when it is asked for."""
        self._look(names_of("names", names))

    def named(self, patterns: Iterable[str]) -> list[str]:
        """The names that one of the patterns fits (`model.layers.0.*`, as shells know them), in order. PhalanxError for
        a pattern that fits none.
        """
        found: set[str] = set()
        for pattern in names_of("names", patterns):
            fitting = {name for name in self if name == pattern or fnmatchcase(name, pattern)}
            if not fitting:
                there = ", ".join(sorted(self)[:8])
                raise PhalanxError(
                    "names", value=pattern, expected=f"the name of a tensor, such as {there}", remedy="list(tensors)"
                )
            found |= fitting
        return [name for name in self if name in found]

    def end(self) -> None:
        """Nothing is read any more; the names stay."""
        self._ended = True

    def _look(self, names: Iterable[str]) -> Index:
        if self._ended:
            raise PhalanxError(
                f"tensors of checkpoint {self.ref} at {self._store.url}",
                expected="to be read inside `with opened(...)`, which has ended",
                remedy="read what you need inside the block",
            )
        return self._lookup.tensors(names)


def load(
    url: str, step: int | None = None, *, names: Iterable[str] = ("*",), settings: StorageSettings | None = None
) -> dict[str, np.ndarray]:
    """The tensors of a live checkpoint by name, whole, verified, all in memory; `opened` is for more than fits.

    url: the job's root, such as `file:///data/projects/p/jobs/demo`. step: the newest live checkpoint where None.
    names: a list of patterns of the tensors wanted, such as ["model.*"]; nothing of others is read.
    numpy has no bfloat16: such tensors are widened to float32, which is exact.
    Raises PhalanxError where the job has no such live checkpoint, DamagedCheckpoint where stored bytes are wrong.
    """
    patterns = names_of("names", names)
    with opened(url, step, settings=settings) as tensors:
        wanted = tensors.named(patterns)
        tensors.find(wanted)
        return {name: tensors[name] for name in wanted}


@contextmanager
def opened(url: str, step: int | None = None, *, settings: StorageSettings | None = None) -> Iterator[Tensors]:
    """A live checkpoint's tensors, read one by one as they are asked for inside the block. Arguments and errors are
    those of `load`; CheckpointRemoved at the end where retention took it nonetheless (this process stood still).
    """
    wanted = None if step is None else step_of(step)
    store = open_store(url, settings)
    ref = live_checkpoint(Lineage(store), wanted)
    with leased(store, ref, "load"):
        tensors = Tensors(store, ref, Lookup(store, Lineage(store).manifest(ref)))
        try:
            yield tensors
        finally:
            tensors.end()


def iterate(store: ObjectStore, ref: CheckpointRef) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of checkpoint `ref` one by one, as `load` gives them; memory of about one tensor."""
    tensors = Tensors(store, ref, Lookup(store, Lineage(store).manifest(ref)))
    yield from ((name, tensors[name]) for name in tensors)


def live_checkpoint(lineage: Lineage, step: int | None) -> CheckpointRef:
    """The live checkpoint of `step`, or the newest; PhalanxError names those there are."""
    live = sorted(lineage.checkpoints())
    found = [ref for ref in live if step is None or ref.step == step]
    if not found:
        there = ", ".join(str(ref.step) for ref in live[-8:])
        expected = f"one of the steps {there}" if live else "a job with a committed checkpoint"
        raise PhalanxError(
            f"checkpoint at {lineage.url}",
            value=step,
            expected=expected,
            remedy="`phalanx checkpoint ls` lists what there is",
        )
    return found[-1]
