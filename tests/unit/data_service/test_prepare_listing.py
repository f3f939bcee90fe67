"""What an input stands for: files, folders, patterns, several of them; always in the same order, and nothing unsaid."""

import os
import random

import pytest
from corpus_builders import found_in, write_file
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare import source_of
from phalanx.data.prepare.inputs.globs import Glob

TREE = ["a.txt", "b/x.jsonl.gz", "b/y.md", "b/c/x.jsonl.gz", "b/c/z.tar", "d/x.jsonl", "d/v1.2_doc.txt"]
OTHERS = ["no.bin", "b/no.bin", "b/none", ".git/x.txt", "b/.hidden.txt", "d/.h/x.txt", "d/z.dat"]


@pytest.fixture
def tree(tmp_path):
    names = [*TREE, *OTHERS]
    random.Random(0).shuffle(names)
    for name in names:
        write_file(tmp_path, f"corpus/{name}", b"x")
    return tmp_path / "corpus"


def test_folder_gives_known_files_by_path_without_hidden_ones_and_counts_others(tree):
    source = source_of(tree)
    assert list(source.paths) == sorted(TREE) and source.root == str(tree) and source.num_bytes == len(TREE)
    assert dict(source.left_out) == {".bin": 2, ".dat": 1, "no suffix": 1}
    assert source_of(f"file://{tree}") == source == source_of(os.path.relpath(tree)) == source_of(f"{tree}/")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("**/*.jsonl.gz", ["b/c/x.jsonl.gz", "b/x.jsonl.gz"]),
        ("*/x.*", ["b/x.jsonl.gz", "d/x.jsonl"]),
        ("[!a-c]/*", ["d/v1.2_doc.txt", "d/x.jsonl"]),
        ("?.txt", ["a.txt"]),
        ("*", TREE),
        ("**", TREE),
        ("b/*", ["b/c/x.jsonl.gz", "b/c/z.tar", "b/x.jsonl.gz", "b/y.md"]),
        ("b/**/c", ["b/c/x.jsonl.gz", "b/c/z.tar"]),
        ("**/.hidden.txt", ["b/.hidden.txt"]),
        ("*/*.dat", ["d/z.dat"]),
        ("b/c/*", ["b/c/x.jsonl.gz", "b/c/z.tar"]),
    ],
)
def test_pattern_gives_what_a_shell_would_with_folders_as_all_below_them(tree, pattern, found):
    source = source_of(f"{tree}/{pattern}")
    prefix = source.root.removeprefix(str(tree)).removeprefix("/")
    assert [f"{prefix}/{path}" if prefix else path for path in source.paths] == sorted(found)


def test_pattern_as_the_name_of_a_file_that_is_there_is_that_file(tmp_path):
    write_file(tmp_path, "a[1]*.txt", b"one")
    write_file(tmp_path, "a1.txt", b"two")
    assert found_in(tmp_path / "a[1]*.txt") == [("a[1]*.txt", "one")]
    assert found_in(tmp_path / "a[1].txt") == [("a1.txt", "two")]


@pytest.mark.parametrize(
    ("inputs", "root", "paths"),
    [
        (["d", "b/c"], "", ["d/v1.2_doc.txt", "d/x.jsonl", "b/c/x.jsonl.gz", "b/c/z.tar"]),
        (["b/c", "b"], "b", ["c/x.jsonl.gz", "c/z.tar", "x.jsonl.gz", "y.md"]),
        (["d/x.jsonl", "d/*.dat"], "d", ["x.jsonl", "z.dat"]),
        (["a.txt", "a.txt", "*.txt"], "", ["a.txt"]),
    ],
)
def test_inputs_keep_their_order_share_a_root_and_name_a_file_once(tree, inputs, root, paths):
    source = source_of([tree / each for each in inputs])
    assert list(source.paths) == paths and source.root == str(tree / root)


def test_inputs_of_distant_folders_have_ids_that_differ(tmp_path):
    for name in ("one/a.txt", "two/deep/a.txt"):
        write_file(tmp_path, name, name.encode())
    assert found_in(tmp_path / "one", tmp_path / "two/deep") == [
        ("one/a.txt", "one/a.txt"),
        ("two/deep/a.txt", "two/deep/a.txt"),
    ]


def test_folder_links_to_folders_are_counted_and_links_to_files_followed(tree):
    (tree / "b/loop").symlink_to(tree)
    (tree / "b/z_link.txt").symlink_to(tree / "a.txt")
    (tree / "b/nothing.txt").symlink_to(tree / "gone.txt")
    source = source_of(tree)
    assert list(source.paths) == sorted([*TREE, "b/z_link.txt"])
    assert source.left_out["links to folders"] == 1 and source.left_out["broken links"] == 1


@pytest.mark.parametrize("pattern", ["", "/*"])
def test_links_in_a_circle_and_pipes_are_left_out_and_counted(tree, pattern):
    (tree / "l1.txt").symlink_to("l2.txt")
    (tree / "l2.txt").symlink_to("l1.txt")
    (tree / "through.txt").symlink_to("a.txt/x")
    os.mkfifo(tree / "pipe.txt")
    source = source_of(f"{tree}{pattern}")
    assert sorted(source.paths) == sorted(TREE)
    assert source.left_out["broken links"] == 3 and source.left_out["pipes, sockets or devices"] == 1
    with pytest.raises(PhalanxError, match="nothing is there"):
        source_of(tree / "l1.txt")


@pytest.mark.parametrize(
    ("given_input", "message"),
    [
        ("nowhere", "nothing is there: check the path"),
        ("nowhere/*.txt", "nothing is there: check the path"),
        ("*.parquet", "nothing is there: check the path"),
        ("no.bin/x", "nothing is there: check the path"),
        ("n*", "it holds none, only 1 .bin: check the path, or name files with a pattern"),
    ],
)
def test_input_that_stands_for_nothing_is_a_one_line_error(tree, given_input, message):
    with pytest.raises(PhalanxError, match=message) as error:
        source_of(f"{tree}/{given_input}")
    assert "\n" not in str(error.value) and given_input in str(error.value)


def test_input_of_no_names_or_of_another_kind_of_url_is_a_one_line_error():
    for inputs in ([], "memory://", "http://host/x", "file://relative"):
        with pytest.raises(PhalanxError, match="expected"):
            source_of(inputs)


def test_file_named_in_full_is_read_whatever_it_is_called(tree):
    assert found_in(tree / "no.bin") == [("no.bin", "x")]
    assert found_in(tree / "b/.hidden.txt") == [(".hidden.txt", "x")]


parts = st.sampled_from(["a", "b.txt", "ab", ".h", "**", "*", "a*", "?", "[ab]", "*.txt"])
plain = st.sampled_from(["a", "b", "ab", "b.txt", ".h", ".txt"])


@given(st.lists(parts, min_size=1, max_size=4), st.lists(plain, min_size=1, max_size=4))
def test_glob_looks_into_every_folder_that_holds_what_it_matches(pattern, path):
    glob = Glob("/".join(pattern))
    if glob.matches("/".join(path)):
        assert all(glob.may_hold("/".join(path[:depth])) for depth in range(1, len(path)))
