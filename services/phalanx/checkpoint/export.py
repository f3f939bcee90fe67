"""A checkpoint as a Hugging Face model folder: config.json, safetensors (one file or several with an index), tokenizer
files.

Tensors pass slab by slab, so memory is less than twice the largest of them, however they were cut. The folder is made
beside the target and renamed when it is whole; an existing target is refused. Killed at any moment, the same export
goes on with the files that are whole (`export_folder`). Format of the folder:
https://huggingface.co/docs/safetensors and transformers' `save_pretrained`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from phalanx.checkpoint.export_files import (
    ExportDtype,
    WeightFile,
    exported_name,
    json_bytes,
    listing,
    plan_digest,
    planned_files,
)
from phalanx.checkpoint.export_folder import HashedFile, PartFolder
from phalanx.core.digest import sha256
from phalanx.lineage import DamagedObject, Manifest, keys
from phalanx.models.hugging_face import INDEX_NAME
from phalanx.objects import ObjectStore
from phalanx.snapshot.dtypes import bfloat16_to_float32, float32_to_bfloat16
from phalanx.snapshot.index import Index
from phalanx.snapshot.lookup import Lookup
from phalanx.snapshot.slabs import Slab, batches, read_slabs, slab_bytes_for

FILE_BYTES: Final = 5 << 30
_CONVERTED: Final = 1 << 20  # elements at once


@dataclass(frozen=True, slots=True)
class Target:
    """What the model is called at Hugging Face.

    config: content of config.json. name_of: from a canonical parameter name to theirs, None for a tensor that they do
    not store. files: further files of the folder (tokenizer.json, ...) by name.
    """

    config: Mapping[str, Any]
    name_of: Callable[[str], str | None]
    files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The folder written, its number of tensors and their bytes, its files, and those of them that an earlier start
    had written.
    """

    folder: str
    num_tensors: int
    num_bytes: int
    files: tuple[str, ...]
    kept: tuple[str, ...]


class Export:
    """An export that is planned: what will be written is known, nothing is written yet.

    dtype: of all floating-point tensors; others keep theirs. file_bytes: a file is closed before it would grow larger.
    Raises DamagedObject where what the checkpoint consists of cannot be read.
    """

    def __init__(
        self,
        store: ObjectStore,
        manifest: Manifest,
        target: Target,
        *,
        dtype: ExportDtype = "float32",
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self._store, self._manifest, self._target, self._dtype = store, manifest, target, dtype
        lookup = Lookup(store, manifest)
        self._index: Index = lookup.tensors(
            [name for name in lookup.names if exported_name(name, target.name_of) is not None]
        )
        self._files = planned_files(self._index, target.name_of, dtype, file_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors in the export."""
        return sum(file.tensor_bytes for file in self._files)

    def run(self, out: Path, progress: Callable[[int], None] = lambda _: None) -> ExportReport:
        """Writes the new folder `out`. `progress` hears the bytes of tensors that are done.

        Raises PhalanxError where `out` exists or is being made, DamagedObject where the checkpoint is damaged (nothing
        is left behind), StoreError where storage or the disk fails (what is whole stays for the next start).
        """
        folder = PartFolder(out, self._name())
        try:
            small = self._small_files()
            if folder.is_renamed:
                kept = self._whole_weights(folder, small, progress)
            else:
                kept = self._write_weights(folder, progress)
                for name, data in small.items():
                    folder.write(name, data)
            folder.finish()
        except DamagedObject:
            folder.discard()
            raise
        finally:
            folder.close()
        num_tensors = sum(len(file.entries) for file in self._files)
        names = (*(file.name for file in self._files), *small)
        return ExportReport(str(out), num_tensors, self.num_bytes, names, tuple(kept))

    def _name(self) -> dict[str, Any]:
        """What a half-made folder must say for this export to go on with it."""
        root = sha256(self._store.read(keys.manifest(self._manifest.ref)))
        names = {"attempt": self._manifest.attempt, "step": self._manifest.step, "manifest": root}
        return {**names, "dtype": self._dtype, "files": plan_digest(self._files)}

    def _write_weights(self, folder: PartFolder, progress: Callable[[int], None]) -> list[str]:
        """Writes the weights that no earlier start has; the names of the files that it had."""
        kept = []
        for file in self._files:
            if folder.holds(file.name, file.num_bytes):
                kept.append(file.name)
                progress(file.tensor_bytes)
                continue
            with folder.create(file.name) as written:
                written.write(file.header)
                self._write_tensors(written, file, progress)
            assert written.num_bytes == file.num_bytes, file.name
        return kept

    def _whole_weights(
        self, folder: PartFolder, small: Mapping[str, bytes], progress: Callable[[int], None]
    ) -> list[str]:
        """The names of all weights, which an earlier start brought to the target. Raises PhalanxError where anything
        there is not what this export writes.
        """
        for file in self._files:
            if not folder.holds(file.name, file.num_bytes):
                raise folder.exists()
            progress(file.tensor_bytes)
        if not all(folder.holds_small(name, data) for name, data in small.items()):
            raise folder.exists()
        return [file.name for file in self._files]

    def _write_tensors(self, written: HashedFile, file: WeightFile, progress: Callable[[int], None]) -> None:
        tensors = [entry.stored for entry in file.entries]
        dtypes = {entry.stored.name: entry.dtype for entry in file.entries}
        for batch in batches(tensors, slab_bytes_for(tensors)):
            for piece in self._pieces(batch, dtypes):
                written.write(piece)
                progress(len(piece))

    def _pieces(self, batch: Sequence[Slab], dtypes: Mapping[str, str]) -> Iterator[memoryview]:
        for slab, values in zip(batch, read_slabs(self._store, self._index, batch), strict=True):
            yield from _converted(values, slab.tensor.dtype, dtypes[slab.tensor.name])

    def _small_files(self) -> dict[str, bytes]:
        index = listing(self._files)
        config = json_bytes({**self._target.config, "dtype": self._dtype})
        return {**({INDEX_NAME: index} if index else {}), "config.json": config, **self._target.files}


def export(
    store: ObjectStore,
    manifest: Manifest,
    out: Path,
    target: Target,
    *,
    dtype: ExportDtype = "float32",
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int], None] = lambda _: None,
) -> ExportReport:
    """Plans an `Export` and runs it."""
    return Export(store, manifest, target, dtype=dtype, file_bytes=file_bytes).run(out, progress)


def _converted(values: np.ndarray, stored: str, wanted: str) -> Iterator[memoryview]:
    """The bytes of `values` in type `wanted`, a piece at a time."""
    flat = values.reshape(-1)
    for first in range(0, len(flat), _CONVERTED):
        yield converted(flat[first : first + _CONVERTED], stored, wanted).view(np.uint8).data


def converted(raw: np.ndarray, stored: str, wanted: str) -> np.ndarray:
    """`raw` (bytes of type `stored`) in type `wanted`: widening is exact, narrowing rounds to nearest even."""
    if stored == wanted:
        return raw
    wide = bfloat16_to_float32(raw) if stored == "bfloat16" else raw.astype(np.float32)
    return float32_to_bfloat16(wide) if wanted == "bfloat16" else wide
