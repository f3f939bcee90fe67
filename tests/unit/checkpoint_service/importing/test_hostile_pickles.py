"""Case 6: metadata of a torch checkpoint is a pickle, which is a program. None of these runs, and each is told in one
line.
"""

from __future__ import annotations

import pickle
import struct
import sys
from pathlib import Path

import pytest

from phalanx.checkpoint.importing.isolated import Limits, unpickled
from phalanx.checkpoint.importing.run import Import, Options
from phalanx.core.errors import PhalanxError
from phalanx.spec import Job

METADATA = "torch.distributed.checkpoint.metadata"
SMALL = Limits(input_bytes=8 << 20, memory_bytes=512 << 20, output_bytes=1 << 20, cpu_s=2)


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value.encode())) + value.encode()


def named(module: str, name: str) -> bytes:
    """Pushes what the pickle calls `module.name`."""
    return text(module) + text(name) + pickle.STACK_GLOBAL


def calling(module: str, name: str, *arguments: str) -> bytes:
    """A pickle that calls it."""
    return b"\x80\x04" + named(module, name) + b"(" + b"".join(map(text, arguments)) + b"tR."


def record(name: str, fields: bytes) -> bytes:
    """A pickled object of one of torch's classes; fields: keys and values in turn."""
    return named(METADATA, name) + b")\x81}(" + fields + b"ub"


def metadata(tensors: bytes = b"", stored: bytes = b"", root: str = "Metadata") -> bytes:
    """Metadata of which this is said; both: keys and values in turn."""
    fields = text("state_dict_metadata") + b"}(" + tensors + b"u" + text("storage_data") + b"}(" + stored + b"u"
    return b"\x80\x04" + record(root, fields) + b"."


def refusal(data: bytes, limits: Limits = SMALL) -> str:
    with pytest.raises(PhalanxError) as caught:
        unpickled("a.metadata", "metadata", [data], limits)
    message = str(caught.value)
    assert "\n" not in message and "nothing of it was run" in message
    return message


def runs(folder: Path) -> dict[str, bytes]:
    """Pickles each of which would leave a file named `ran` in `folder`."""
    mark = str(folder / "ran")
    (folder / "evil.py").write_text(f"open({mark!r}, 'w')")
    nested = metadata(text("a") + named("posix", "system") + b"(" + text(f"touch {mark}") + b"tR")
    state = metadata(
        text("a") + record("BytesStorageMetadata", text("x") + calling("os", "system", f"touch {mark}")[2:-1])
    )
    return {
        "reduce": calling("posix", "system", f"touch {mark}"),
        "reduce os": calling("os", "system", f"touch {mark}"),
        "eval": calling("builtins", "eval", f"open({mark!r}, 'w')"),
        "exec": calling("builtins", "exec", f"open({mark!r}, 'w')"),
        "getattr": calling("builtins", "getattr", "a", "b"),
        "import": calling("builtins", "__import__", "evil"),
        "module with side effects": calling("evil", "anything"),
        "open": calling("io", "open", mark, "w"),
        "subprocess": calling("subprocess", "getoutput", f"touch {mark}"),
        "protocol 0": f"cposix\nsystem\n(Vtouch {mark}\ntR.".encode(),
        "instance": f"(Vtouch {mark}\niposix\nsystem\n.".encode(),
        "object": b"(cposix\nsystem\n" + text(f"touch {mark}") + b"o.",
        "deep inside": nested,
        "in a state": state,
        "attribute of an allowed name": calling(METADATA, "Metadata.__init__.__globals__"),
        "torch itself": calling("torch", "load", mark),
        "hub": calling("torch.hub", "load", str(folder), "evil"),
    }


def test_a_pickle_that_names_a_function_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 6."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for which, data in runs(tmp_path).items():
        assert "names" in refusal(data), which
        assert not (tmp_path / "ran").exists() and "evil" not in sys.modules, which


def bombs() -> dict[str, bytes]:
    """Pickles that cost more than they weigh."""
    doubled = b"(" + text("x") + b"t" + b"".join(b"q%c(h%ch%ct" % (n, n, n) for n in range(60))
    return {
        "memo": b"\x80\x04]r\xff\xff\xff\x7f.",
        "deep": b"\x80\x04" + b")" + b"\x85" * 2_000_000 + b".",
        "marks": b"\x80\x04" + b"(" * 2_000_000 + b".",
        "long number": b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
        "long text": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.",
        "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
        "key that takes for ever to hash": b"\x80\x04}" + doubled + b"Ns.",
        "cut": metadata()[:-5],
        "nothing": b"",
        "noise": bytes(range(256)),
        "another object": b"\x80\x04N.",
        "another class": metadata(root="StorageMeta"),
        "outside": b"\x80\x04" + text("x") + b"Q.",
        "extension": b"\x80\x04\x82\x01.",
        "a class changed": b"\x80\x04" + named(METADATA, "Metadata") + b"N}(" + text("find_class") + b"Nu\x86b.",
        "a number for a name": metadata(b"K\x01" + record("BytesStorageMetadata", b"")),
        "no state": b"\x80\x04" + named(METADATA, "Metadata") + b")\x81.",
    }


def test_bombs_and_noise_are_refused_within_their_limits() -> None:
    """Case 6."""
    for which, data in bombs().items():
        assert "a.metadata is " in refusal(data), which


def test_an_answer_or_a_pickle_beyond_the_limits_is_refused() -> None:
    """Case 6: output and input are bounded as memory and time are."""
    names = b"".join(text(f"{n}" * 40) + record("BytesStorageMetadata", b"") for n in range(1000, 1400))
    assert unpickled("a.metadata", "metadata", [metadata(names)], SMALL)
    assert "ended with" in refusal(metadata(names), Limits(output_bytes=1000))
    assert "at most 100 bytes" in refusal(metadata(names), Limits(input_bytes=100))


def tensor(name: str, size: int = 4) -> bytes:
    """An entry of one float32 box."""
    sizes = named("torch", "Size") + b"(K%ct\x85R" % size
    offsets = named("torch", "Size") + b"(K\x00t\x85R"
    properties = named(METADATA, "TensorProperties") + b")\x81(" + named("torch", "float32") + b"N\x89N\x89tb"
    chunk = record("ChunkStorageMetadata", text("offsets") + offsets + text("sizes") + sizes)
    fields = text("properties") + properties + text("size") + sizes + text("chunks") + b"](" + chunk + b"e"
    return text(name) + record("TensorStorageMetadata", fields)


def place(name: str, file: str, start: bytes = b"K\x00", length: bytes = b"K\x10") -> bytes:
    """Where its box is said to be."""
    offsets = named("torch", "Size") + b"(K\x00t\x85R"
    index = record("MetadataIndex", text("fqn") + text(name) + text("offset") + offsets)
    fields = text("relative_path") + text(file) + text("offset") + start + text("length") + length
    return index + named("torch.distributed.checkpoint.filesystem", "_StorageInfo") + b")\x81}(" + fields + b"ub"


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (place("a", "../secret"), "inside the folder"),
        (place("a", "/etc/passwd"), "inside the folder"),
        (place("a", "gone.distcp"), "missing"),
        (place("a", "x.distcp", length=b"J\xff\xff\xff\x7f"), "as long as"),
        (place("a", "x.distcp", start=b"J\xff\xff\xff\xff"), "as long as"),
        (place("b", "x.distcp"), "a box that is stored"),
    ],
)
def test_metadata_that_points_elsewhere_is_refused(tmp_path: Path, job: Job, stored: bytes, expected: str) -> None:
    """Case 6: well-formed metadata reaches no file outside its folder."""
    folder = tmp_path / "dcp"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"x" * 64)
    (folder / "x.distcp").write_bytes(b"x" * 64)
    (folder / ".metadata").write_bytes(metadata(tensor("a"), stored))
    with pytest.raises(PhalanxError, match=expected):
        Import(job, str(folder), Options(rotary="half"))
