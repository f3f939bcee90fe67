"""The way of a user's own code: packed where the job starts, kept in the job's storage under its digest, unpacked once
on each node, first on the import path of every rank.

The object is created once and named by what it holds, so to ship it again changes nothing. Each attempt records the
digest in its placement. A job that goes on runs what its newest attempt ran, unless `code.on_change` says otherwise. A
folder in a node's cache comes to its name by rename(2) when it is whole, and is verified against the digest before it
is used: one that something has tidied up in part is left alone, and another is laid out beside it. Free of torch.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.core.digest import sha256
from phalanx.core.errors import PhalanxError
from phalanx.lineage import Lineage
from phalanx.lineage.keys import code as code_key
from phalanx.objects import ObjectExists, ObjectMissing, ObjectStore
from phalanx.spec import Job
from phalanx.trainer.caching import code_folder
from phalanx.trainer.packing import IGNORE_FILE, Archive, pack, unpack
from phalanx.trainer.places import job_store

MOST_DAMAGED = 100
# What ranks import by these names must not be the user's, whose folder comes first on the import path.
_LIBRARIES = """
    phalanx torch torchao torchgen triton numpy pydantic pydantic_core annotated_types typing_extensions fsspec obstore
    safetensors tokenizers xxhash rich typer click zstandard pyarrow grpc google opentelemetry cryptography jwt psutil
    tensorboard wandb sympy networkx jinja2
"""
_TAKEN = (sys.stdlib_module_names - {"test"}).union(_LIBRARIES.split())


def with_code(job: Job, *, ships: bool = True) -> tuple[Job, tuple[str, ...]]:
    """The job with the digest of the code that its ranks are to run, which is in its storage then; and what must be
    told about it. A job without a folder, or whose code was packed before, comes back as it is. ships: false packs it
    and looks, and stores nothing.

    Raises PhalanxError where the folder can't be packed, or has changed and must not.
    """
    path, wanted = job.code.path, job.code.on_change
    if path is None or job.code.digest is not None:
        return job, ()
    archive, recorded = pack(Path(path), _own_outputs(job)), recorded_digest(job)
    digest, told = archive.digest, ""
    if recorded not in (None, digest):
        if wanted == "refuse":
            raise PhalanxError(
                "code.path",
                value=path,
                expected=f"the code that the newest attempt ran ({recorded}), found {digest}",
                remedy='put it back, or set code.on_change to "take" or "keep"',
            )
        told = f"code.path {path} has changed since the newest attempt: "
        if wanted == "keep":
            digest = str(recorded)
            told += f'the job goes on with the code of that one, {digest}; code.on_change = "take" takes the new one'
        else:
            told += f"the job goes on with the new code, {digest}"
    if digest == archive.digest:
        _check_modules(path, archive)
    if ships and digest == archive.digest:
        _ship(job_store(job), digest, archive.data)
    code = job.code.model_copy(update={"digest": digest})
    return job.model_copy(update={"code": code}), (told,) if told else ()


def _check_modules(path: str, archive: Archive) -> None:
    taken = min(archive.modules.keys() & _TAKEN, default=None)
    if taken is not None:
        raise PhalanxError(
            "code.path",
            value=str(Path(path) / archive.modules[taken]),
            expected=f"names of your own: ranks would import it in the place of the module {taken} that they need",
            remedy=f"rename it, or list it in {IGNORE_FILE}",
        )


def recorded_digest(job: Job) -> str | None:
    """The digest of the packed code that the job's newest attempt runs; None where it has none, or ran no such."""
    newest = Lineage(job_store(job)).newest_attempt()
    recorded = newest.placement.get("code") if newest is not None else None
    return str(recorded["digest"]) if recorded else None


def carry_code(origin: Job, job: Job) -> None:
    """Copies the code that a fork takes over from its origin into the fork's own storage."""
    digest = job.code.digest
    if digest is not None and digest == origin.code.digest:
        _ship(job_store(job), digest, _read(origin, digest))


def enter_code(job: Job) -> None:
    """Makes this process import the job's packed code, and no other, from now on; nothing for a job without one.

    Raises PhalanxError where storage does not have it, or the cache folder can't be used.
    """
    if job.code.digest is None:
        return
    folder = unpacked(job, job.code.digest)
    sys.path[:] = [str(folder), *(place for place in sys.path if Path(place).parent != folder.parent)]
    named = {path.partition(":")[0].partition(".")[0] for path in job.own_names.values()}
    tops = {top for top in named if (folder / top).is_dir() or (folder / f"{top}.py").exists()}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        is_other = name.partition(".")[0] in tops or folder.parent in Path(file).parents
        if is_other and folder not in Path(file).parents:
            del sys.modules[name]
    importlib.invalidate_caches()


def unpacked(job: Job, digest: str) -> Path:
    """The folder on this node that holds the code, whole."""
    root = code_folder(job)
    found = next((place for place in _places(root, digest) if _is_whole(place, digest)), None)
    if found is not None:
        return found
    data = _read(job, digest)
    with _locked(root):
        for place in _places(root, digest):
            if _is_whole(place, digest):
                return place
            if not place.exists():
                return _laid_out(data, place)
    raise PhalanxError(
        "cluster.cache_folder", value=str(root), expected="a folder whose files stay", remedy="empty it or name another"
    )


def _laid_out(data: bytes, place: Path) -> Path:
    unfinished = place.parent / ".unfinished"  # under the lock: one that is there was left by a process that was killed
    shutil.rmtree(unfinished, ignore_errors=True)
    unpack(data, unfinished)
    unfinished.rename(place)
    return place


def _places(root: Path, digest: str) -> Iterator[Path]:
    digits = digest.rpartition(":")[2]
    yield root / digits
    yield from (root / f"{digits}-{number}" for number in range(1, MOST_DAMAGED))


def _is_whole(folder: Path, digest: str) -> bool:
    try:
        return folder.is_dir() and pack(folder).digest == digest
    except PhalanxError:  # it says why it could not be packed: then it is not what was unpacked
        return False


def _read(job: Job, digest: str) -> bytes:
    key = code_key(digest)
    try:
        data = job_store(job).read(key)
    except ObjectMissing:
        data = b""
    if sha256(data) != digest:
        raise PhalanxError(
            "code.digest",
            value=digest,
            expected=f"the packed code at {key} below the job's root, whole",
            remedy='start the job from its folder with code.path and code.on_change = "take"',
        )
    return data


def _ship(store: ObjectStore, digest: str, data: bytes) -> None:
    try:
        store.create(code_key(digest), data)
    except ObjectExists:
        return  # by its name it holds the same; whoever reads it verifies that


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Only one process of this node lays code out at a time; the kernel ends the lock with its process."""
    fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _own_outputs(job: Job) -> list[Path]:
    """What the job itself reads and writes may lie in the folder of its code, and is no part of it."""
    urls = [job.job.storage, *(source.url for source in job.data.training.values()), job.data.held_out or ""]
    places = [url.removeprefix("file://") for url in urls if url.startswith("file://")]
    places += [job.metrics.folder, job.cluster.cache_folder or ""]
    return [Path(place).expanduser().absolute() for place in places if place]
