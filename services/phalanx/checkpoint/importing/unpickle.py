"""Reads pickles of torch as plain data: a program of its own, which nothing imports.

    python -I -S -B unpickle.py KIND MEMORY_BYTES CPU_S

KIND: `metadata` (one `.metadata` of torch.distributed.checkpoint), `tensors` (the data.pkl of saved tensors) or
`numbers` (the data.pkl of saved Python numbers). stdin: for each pickle its length (8 bytes, little endian) and its
bytes. stdout: one JSON object, `{"found": [...]}` or `{"refused": "why", "number": n}`, the number of the
pickle that is. The parent limits the size of stdout
(RLIMIT_FSIZE) and the time.

A pickle is a program: it names functions, and loading it calls them. Here a name is looked up in a table of the few
that torch writes, never imported, and what the table holds makes plain records. Any other name ends the program, as
does whatever would open a file, start a process or import a module once the pickles have been read from stdin.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

METADATA = "torch.distributed.checkpoint.metadata"
DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
FORBIDDEN = ("open", "import", "exec", "compile", "os.", "subprocess.", "socket.", "ctypes.", "shutil.", "marshal.")


class Refused(Exception):
    """The pickle holds something that none of torch's has."""


class Sealed(type):
    """Classes that a pickle cannot change."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise Refused(f"sets {name} of a class")


class Record(metaclass=Sealed):
    """Stands for an instance of one of torch's classes: its arguments and its state, as they stand in the pickle."""

    def __new__(cls, *args: object) -> Record:
        made = object.__new__(cls)
        made.__dict__["args"] = args
        return made

    def __setstate__(self, state: object) -> None:
        self.__dict__["state"] = state


class Metadata(Record):
    pass


class Tensor(Record):
    pass


class Bytes(Record):
    pass


class Chunk(Record):
    pass


class Properties(Record):
    pass


class Index(Record):
    pass


class Storage(Record):
    pass


class Other(Record):
    pass


class Rebuilt(Record):
    pass


class Word(str, metaclass=Sealed):
    """A value that a pickle names: a type of elements."""


def size(items: tuple[object, ...] = ()) -> tuple[object, ...]:
    """torch.Size."""
    return tuple(items)


def nothing(*args: object) -> None:
    """What a pickle makes and nobody needs."""


def ordered(*args: Any) -> dict[object, object]:
    """collections.OrderedDict."""
    return dict(*args)


NAMES: Mapping[str, Mapping[tuple[str, str], object]] = {
    "metadata": {
        **{("torch", name): Word(name) for name in DTYPES},
        ("torch", "Size"): size,
        ("torch.serialization", "_get_layout"): nothing,
        ("collections", "OrderedDict"): ordered,
        ("pathlib", "PosixPath"): nothing,
        (METADATA, "Metadata"): Metadata,
        (METADATA, "TensorStorageMetadata"): Tensor,
        (METADATA, "BytesStorageMetadata"): Bytes,
        (METADATA, "ChunkStorageMetadata"): Chunk,
        (METADATA, "TensorProperties"): Properties,
        (METADATA, "MetadataIndex"): Index,
        (METADATA, "StorageMeta"): Other,
        (METADATA, "_MEM_FORMAT_ENCODING"): nothing,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Storage,
    },
    "tensors": {
        **{("torch", name): Word(dtype) for name, dtype in STORAGES.items()},
        ("torch._utils", "_rebuild_tensor_v2"): Rebuilt,
        ("collections", "OrderedDict"): ordered,
    },
    "numbers": {},
}


class PlainUnpickler(pickle.Unpickler):
    """Knows the names of one kind of pickle, and imports nothing."""

    def __init__(self, file: io.BytesIO, kind: str) -> None:
        super().__init__(file)
        self._kind = kind

    def find_class(self, module: str, name: str) -> object:
        found = NAMES[self._kind].get((module, name))
        if found is None:
            raise Refused(f"names {module}.{name}")
        return found

    def persistent_load(self, pid: object) -> object:
        if self._kind != "tensors" or not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise Refused("refers to an object outside itself")
        return pid


def need(value: object, kind: type[T], what: str) -> T:
    """`value`, which must be of that very type."""
    if type(value) is not kind:
        raise Refused(f"has {what} that is no {kind.__name__}")
    return value


def state_of(record: object, kind: type[Record], what: str) -> dict[str, object]:
    """The state of a record of that very class, by field."""
    return need(need(record, kind, what).__dict__.get("state"), dict, what)


def numbers(value: object, what: str) -> list[int]:
    """A tuple of whole numbers, as a list."""
    return [need(each, int, what) for each in need(value, tuple, what)]


def metadata(value: object) -> dict[str, object]:
    """What of a `.metadata` matters: tensors, other entries, and where each is stored."""
    fields = state_of(value, Metadata, "a root")
    tensors, others = [], []
    for name, entry in need(fields.get("state_dict_metadata"), dict, "state_dict_metadata").items():
        if type(entry) is Bytes:
            others.append(need(name, str, "a name"))
            continue
        row = state_of(entry, Tensor, f"an entry {name!r:.200}")
        chunks = [state_of(each, Chunk, "a chunk") for each in need(row.get("chunks"), list, "chunks")]
        tensors.append(
            {
                "name": need(name, str, "a name"),
                "dtype": dtype_of(row.get("properties")),
                "shape": numbers(row.get("size"), "a size"),
                "chunks": [[numbers(each.get(key), key) for key in ("offsets", "sizes")] for each in chunks],
            }
        )
    stored = need(fields.get("storage_data"), dict, "storage_data").items()
    return {"tensors": tensors, "others": others, "stored": [entry_of(index, info) for index, info in stored]}


def dtype_of(properties: object) -> str:
    """The type of a tensor's elements: the first of five properties."""
    state = need(need(properties, Properties, "properties").__dict__.get("state"), tuple, "properties")
    return str(need(state[0] if state else None, Word, "a dtype"))


def entry_of(index: object, info: object) -> dict[str, object]:
    """Where one box of a tensor, or another entry, is stored."""
    key, place = state_of(index, Index, "an index"), state_of(info, Storage, "a place")
    offset = key.get("offset")
    return {
        "name": need(key.get("fqn"), str, "a name"),
        "offset": None if offset is None else numbers(offset, "an offset"),
        "file": need(place.get("relative_path"), str, "a file"),
        "start": need(place.get("offset"), int, "an offset"),
        "num_bytes": need(place.get("length"), int, "a length"),
        "transformed": bool(place.get("transform_descriptors")),
    }


def tensor(value: object) -> dict[str, object]:
    """Which elements of its storage a saved tensor is."""
    args = need(value, Rebuilt, "a root").__dict__["args"]
    if len(args) < 4:
        raise Refused("has a tensor without a shape")
    storage = need(args[0], tuple, "a storage")
    return {
        "dtype": str(need(storage[1], Word, "a dtype")),
        "key": need(storage[2], str, "a key"),
        "first": need(args[1], int, "an offset"),
        "shape": numbers(args[2], "a size"),
        "strides": numbers(args[3], "strides"),
    }


def number(value: object) -> dict[str, object]:
    """A saved number that is finite."""
    if type(value) not in (int, float) or not isinstance(value, int | float) or not abs(value) < 2**63:
        raise Refused("has a value that is no number")
    return {"value": value}


def pickles(data: bytes) -> Iterator[bytes]:
    """The pickles in stdin."""
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        yield data[at + 8 : at + 8 + length]
        at += 8 + length


def watch(event: str, args: object) -> None:
    """Ends the process where anything reaches out of it."""
    if event.startswith(FORBIDDEN):
        os._exit(70)


def main(kind: str, memory_bytes: int, cpu_s: int) -> None:
    """Reads stdin, and writes the answer to stdout."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    readers: dict[str, Callable[[object], dict[str, object]]] = {
        "metadata": metadata,
        "tensors": tensor,
        "numbers": number,
    }
    read = readers[kind]
    data, out = sys.stdin.buffer.read(), sys.stdout
    sys.addaudithook(watch)
    found: list[dict[str, object]] = []
    try:
        found.extend(read(PlainUnpickler(io.BytesIO(each), kind).load()) for each in pickles(data))
        answer = json.dumps({"found": found})
    except Refused as error:
        answer = json.dumps({"refused": str(error)[:300], "number": len(found)})
    except MemoryError:
        answer = json.dumps({"refused": f"needs more than {memory_bytes} bytes of memory", "number": len(found)})
    except Exception as error:  # noqa: BLE001  (handed on: the parent raises it)
        answer = json.dumps({"refused": f"cannot be read: {type(error).__name__}: {error}"[:300], "number": len(found)})
    out.write(answer)
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
