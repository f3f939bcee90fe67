"""Parts of files as memory: nothing is copied, and all processes of a machine share the pages.

A file that is cut short while it is mapped ends the process that touches what is gone (SIGBUS). Objects are never
changed, so that is damage; whoever starts next finds it by the file's size.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import TypeAlias

from phalanx.core.errors import OutsideError
from phalanx.objects import ObjectMissing
from phalanx.stream.shards import MalformedShard

Bytes: TypeAlias = bytes | memoryview


def map_file(path: Path, key: str, start: int, num_bytes: int, whole_bytes: int) -> memoryview:
    """Bytes [start, start + num_bytes) of the object `key`, which is a file; unmapped when their last view is gone.

    Raises ObjectMissing, MalformedShard where the file has not `whole_bytes`, OutsideError where it can't be read.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ObjectMissing(key) from error
    except OSError as error:
        raise OutsideError(f"{path}: {error.strerror or error}") from error
    try:
        found = os.fstat(file).st_size
        if found != whole_bytes:
            raise MalformedShard(f"the object has {found} bytes, the manifest says {whole_bytes}")
        return map_open(file, start, num_bytes)
    except OSError as error:
        if error.errno == errno.EISDIR:
            raise ObjectMissing(key) from error
        raise OutsideError(f"{path}: {error.strerror or error}") from error
    finally:
        os.close(file)


def map_open(file: int, start: int, num_bytes: int) -> memoryview:
    """Bytes [start, start + num_bytes) of an open file, read ahead into the page cache; raises OSError."""
    skip = start % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(file, skip + num_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=start - skip)
    mapped.madvise(mmap.MADV_WILLNEED)
    return memoryview(mapped)[skip:]
