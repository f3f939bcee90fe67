"""The archive of a user's code: the same for the same tree, whole after unpacking, and refused where it can't be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.trainer import packing
from phalanx.trainer.packing import IGNORE_FILE, pack, unpack


def _tree(folder: Path) -> Path:
    """A package with a file, a script, a template, a link inside and all that is left out by itself."""
    for name in ("own/deep/__pycache__", ".git", "venv/lib", "node_modules/x"):
        (folder / name).mkdir(parents=True)
    (folder / "own/__init__.py").write_text("width = 1\n")
    (folder / "own/deep/a.py").write_text("a = 1\n")
    (folder / "own/deep/words.txt").write_text("hello\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "own/alias.py").symlink_to("deep/a.py")
    (folder / "linked").symlink_to("own/deep")
    for name in ("own/deep/__pycache__/a.pyc", ".git/HEAD", "venv/pyvenv.cfg", "venv/lib/x.py", "node_modules/x/y.js"):
        (folder / name).write_text("left out")
    return folder


def _names(data: bytes, folder: Path) -> list[str]:
    unpack(data, folder)
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def test_archive_follows_from_names_and_contents_alone(tmp_path: Path) -> None:
    one, other = _tree(tmp_path / "one"), _tree(tmp_path / "other")
    for number, path in enumerate(sorted(other.rglob("*.py"))):
        os.utime(path, (number, number))
    (other / "own/deep/a.py").chmod(0o600)
    assert pack(one) == pack(other)
    (other / "own/deep/a.py").write_text("a = 2\n")
    assert pack(one).digest != pack(other).digest


def test_unpacked_tree_is_the_tree_and_packs_to_the_same_archive(tmp_path: Path) -> None:
    archive = pack(_tree(tmp_path / "own"))
    out = tmp_path / "out"
    expected = ["own/__init__.py", "own/alias.py", "own/deep/a.py", "own/deep/words.txt", "run.sh"]
    assert _names(archive.data, out) == expected
    assert (out / "run.sh").stat().st_mode & 0o111 and (out / "own/alias.py").read_text() == "a = 1\n"
    assert (out / "linked/words.txt").read_text() == "hello\n"
    assert pack(out) == archive


NAMES = st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map("".join)


@given(files=st.dictionaries(st.tuples(NAMES, NAMES), st.binary(max_size=30), max_size=6))
def test_any_tree_comes_back(files: dict[tuple[str, str], bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tree")
    (folder / "main.py").touch()
    for (parent, name), content in files.items():
        (folder / f"{parent}_").mkdir(exist_ok=True)
        (folder / f"{parent}_" / name).write_bytes(content)
    archive, out = pack(folder), tmp_path_factory.mktemp("out")
    unpack(archive.data, out)
    assert pack(out) == archive
    assert {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()} == {
        "main.py": b"",
        **{f"{parent}_/{name}": content for (parent, name), content in files.items()},
    }


@pytest.mark.parametrize(
    ("pattern", "gone"),
    [
        ("*.txt", {"own/deep/words.txt"}),
        ("deep/", {"own/deep/a.py", "own/deep/words.txt", "own/alias.py", "linked"}),
        ("own/deep/*.txt", {"own/deep/words.txt"}),
        ("/run.sh", {"run.sh"}),
        ("/words.txt", set()),
        ("run.sh/", set()),
    ],
)
def test_ignore_file_leaves_out_what_it_names(pattern: str, gone: set[str], tmp_path: Path) -> None:
    folder = _tree(tmp_path / "own")
    (folder / IGNORE_FILE).write_text(f"# not packed\n\n{pattern}\nalias.py\nlinked\n")
    names = {"own/__init__.py", "own/deep/a.py", "own/deep/words.txt", "run.sh"}
    assert set(_names(pack(folder).data, tmp_path / "out")) == names - gone


def test_what_is_excluded_is_left_out(tmp_path: Path) -> None:
    folder = _tree(tmp_path / "own")
    before = pack(folder)
    (folder / "store").mkdir()
    (folder / "store/checkpoint.py").write_text("x" * 100)
    assert pack(folder, [folder / "store", tmp_path / "elsewhere"]) == before


def _link(folder: Path, target: str) -> None:
    (folder / "bad").symlink_to(target)


def _many(folder: Path) -> None:
    for number in range(packing.MAX_FILES + 1):
        (folder / "own/deep" / f"{number}.txt").touch()


def _large(folder: Path) -> None:
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(packing.MAX_BYTES + 1)


REFUSED = {
    "out of the tree": (lambda folder: _link(folder, "../../etc"), "bad -> .*links to what lies in the folder"),
    "absolute": (lambda folder: _link(folder, "/etc/hostname"), "bad -> /etc/hostname"),
    "dangling": (lambda folder: _link(folder, "nothing"), "bad -> nothing"),
    "to itself": (lambda folder: _link(folder, "bad"), "bad -> bad"),
    "to what is left out": (lambda folder: _link(folder, ".git/HEAD"), "links to what is packed too"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe"), "pipe.*files, folders and links"),
    "negation": (lambda folder: (folder / IGNORE_FILE).write_text("!a\n"), "'!a': expected patterns"),
    "many files": (_many, r"at most 2,000 files and 64 MiB, found 2,0\d\d files.*\(own: 2,00\d files.*\.phalanxignore"),
    "large": (_large, r"found 7 files with 64\.0 MiB \(weights\.bin: 1 files, 64\.0 MiB\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_tree_that_cannot_be_packed_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    spoil, told = REFUSED[what]
    folder = _tree(tmp_path / "own")
    spoil(folder)
    with pytest.raises(PhalanxError, match=told) as refused:
        pack(folder)
    assert "\n" not in str(refused.value)


def test_folder_that_is_none_or_has_no_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match="expected a folder;"):
        pack(tmp_path / "nothing")
    with pytest.raises(PhalanxError, match="a folder with Python files"):
        pack(tmp_path)


def test_other_bytes_are_no_archive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r".+"):
        unpack(b"x" * 2000, tmp_path)
