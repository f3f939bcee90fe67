"""A process that reads remote shards through the node's cache and a shard table, and is killed at any point."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from stream_builders import numbered_documents, write_split

from phalanx.objects import open_store
from phalanx.stream import open_split

TESTS = Path(__file__).parent
READS = """
    import sys
    from pathlib import Path
    import numpy as np
    from phalanx.objects import open_store
    from phalanx.objects.faults import FaultyStore
    from phalanx.stream import Order, ShardIndices, WindowReader, open_split
    from phalanx.stream.node_cache import NodeCache

    url, node = sys.argv[1], Path(sys.argv[2])
    store = FaultyStore(open_store(url))  # its objects are no files here, as those of a bucket
    split = open_split(store, node_folder=node / "objects")
    order = Order(split, 3, 16, 2, ShardIndices(store, split))
    cache = NodeCache(node / "pieces", 1 << 30)
    with WindowReader(store, split, order, True, cache=cache, reads_ahead=True) as reader:
        for position in range(split.num_tokens // 16):
            print(position, reader.read(np.array([position])).rows.xxh3[0], flush=True)
"""
PIECE = re.compile(r"[0-9a-f]+-[0-9]+-[0-9]+")
TABLE = re.compile(r"[0-9a-f]{64}\.object")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A split of many small shards with a table of its own."""
    folder = tmp_path_factory.mktemp("killed") / "split"
    lengths = [[20 + (7 * shard + document) % 50 for document in range(6)] for shard in range(24)]
    write_split(open_store(f"file://{folder}"), numbered_documents(lengths), inline_shards=4)
    assert (folder / "shards.safetensors").is_file()
    return f"file://{folder}"


def reading(url: str, node: Path) -> subprocess.Popen[str]:
    node.mkdir(exist_ok=True)
    command = [sys.executable, "-c", textwrap.dedent(READS), url, str(node)]
    environment = {**os.environ, "TMPDIR": str(node), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def shared_memory_of(pid: int) -> Iterator[str]:
    """What a process has of /dev/shm, mapped or open."""
    yield from (line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm" in line)
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(file.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("/dev/shm"):
            yield target


def left(node: Path) -> tuple[set[str], set[str]]:
    """What lies in the node's folder: what is to be there, and all else but parts of pieces."""
    files = {path.relative_to(node).as_posix() for path in node.rglob("*") if path.is_file()}
    known = {
        name
        for name in files
        if (name.startswith("pieces/") and PIECE.fullmatch(name.removeprefix("pieces/").removesuffix(".part")))
        or (name.startswith("objects/") and TABLE.fullmatch(name.removeprefix("objects/")))
    }
    return known, files - known


def test_reader_killed_anywhere_leaves_no_shared_memory_and_nothing_in_the_way(url: str, tmp_path: Path) -> None:
    """Case 9: real processes; the next one reads on, and ends with whole pieces and one table, without a part."""
    whole = reading(url, tmp_path / "other")
    lines = whole.communicate(timeout=120)[0].splitlines()
    split = open_split(open_store(url))
    assert whole.returncode == 0 and len(lines) == split.num_tokens // 16
    node = tmp_path / "node"
    for stop in np.linspace(1, len(lines) - 1, 5).astype(int).tolist():
        process = reading(url, node)
        assert process.stdout is not None
        read = [process.stdout.readline() for _ in range(stop)]
        shared = list(shared_memory_of(process.pid))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL and [line.strip() for line in read] == lines[:stop]
        assert not shared and not left(node)[1]
    last = reading(url, node)
    assert last.communicate(timeout=120)[0].splitlines() == lines and last.returncode == 0
    known, others = left(node)
    assert not others and known == left(tmp_path / "other")[0]
    assert len([name for name in known if name.startswith("objects/")]) == 1
    assert not [name for name in known if name.endswith(".part")]
