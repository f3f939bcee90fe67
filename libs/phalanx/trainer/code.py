"""The digest of the code that trains, so that a checkpoint says what made it. Free of torch."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterator, Sequence
from importlib import resources, util
from importlib.resources.abc import Traversable
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.models.own import own_object
from phalanx.spec import Job

ROOMS = ("core", "lineage", "models", "objects", "parallel", "snapshot", "spec", "stream", "trainer")
MAX_USER_FILES, MAX_USER_BYTES = 2000, 64 << 20
LOG = logging.getLogger(__name__)


def own_code(job: Job) -> tuple[str, ...]:
    """What stands for the user's own code in `code_digest`: the digest of the archive where it was packed, else
    whatever the job names.
    """
    if job.code.digest is not None:
        return (job.code.digest,)
    return tuple(dict.fromkeys(job.own_names.values()))


def code_digest(*own: str) -> str:
    """SHA-256 over names and bytes of all sources of the rooms that run inside a rank, and of the user's own.

    own: as `own_code` gives it. Of a `package.module:name`, already imported, its code is every .py file of its
    top-level package, or of its module alone where that is no package, or one of more than MAX_USER_FILES files or
    MAX_USER_BYTES bytes.
    """
    import phalanx.core

    libs = resources.files(phalanx.core).joinpath("..")
    digest = hashlib.sha256()
    for room in ROOMS:
        _add(digest, libs.joinpath(room), room)
    files: dict[str, Path] = {}
    for each in own:
        if each.startswith("sha256:"):
            _add_file(digest, "user", each.encode())
        else:
            files.update(_user_files(each.partition(":")[0]))
    for name, path in files.items():
        _add_file(digest, f"user/{name}", path.read_bytes())
    return f"sha256:{digest.hexdigest()}"


def import_own(own: Sequence[str]) -> None:
    """Imports the modules behind what `own_code` gives; packed code needs none. Raises PhalanxError where one fails."""
    for each in own:
        if not each.startswith("sha256:"):
            own_object("code of the job", each)


def require_own_code(job: Job, expected: str) -> None:
    """Raises PhalanxError where a user's code lies on this node in another version than the attempt was opened with.

    For ranks beside an agent: their fork server holds Phalanx itself as its agent checked it, and each rank imports the
    user's code anew. Packed code was verified as it was unpacked.
    """
    own = own_code(job)
    if not own or job.code.digest is not None:
        return
    import_own(own)
    found = code_digest(*own)
    if found != expected:
        raise PhalanxError(
            f"code of {', '.join(own)} on this node",
            value=found,
            expected=f"{expected}, with which the attempt was opened",
            remedy="let the code be while the job runs, the same on every node; resume the job to take up a change, or "
            "let code.path pack it",
        )


def _add(digest: hashlib._Hash, folder: Traversable, name: str) -> None:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        path = f"{name}/{entry.name}"
        if entry.is_dir() and entry.name != "__pycache__":
            _add(digest, entry, path)
        elif entry.name.endswith((".py", ".toml")):
            _add_file(digest, path, entry.read_bytes())


def _add_file(digest: hashlib._Hash, name: str, data: bytes) -> None:
    digest.update(f"{name}\0{len(data)}\0".encode())
    digest.update(data)


def _user_files(module: str) -> list[tuple[str, Path]]:
    """Names below the import path, which don't depend on where it lies, and files."""
    top = module.partition(".")[0]
    spec = util.find_spec(top)
    if spec is not None and spec.submodule_search_locations is not None:
        files = list(_files_of(top, [Path(place) for place in spec.submodule_search_locations]))
        num_bytes = sum(path.stat().st_size for _, path in files)
        if len(files) <= MAX_USER_FILES and num_bytes <= MAX_USER_BYTES:
            return files
        LOG.warning("package %s is large: the code digest covers its module %s alone", top, module)
    source = getattr(sys.modules.get(module), "__file__", None)
    if source is None:
        LOG.warning("module %s has no file: the code digest does not cover it", module)
        return []
    return [(module, Path(source))]


def _files_of(top: str, places: list[Path]) -> Iterator[tuple[str, Path]]:
    for place in places:
        for path in sorted(place.rglob("*.py")):
            yield f"{top}/{path.relative_to(place).as_posix()}", path
