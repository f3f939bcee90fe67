"""WebDataset tars as input: samples by the rule for names, and every damage an error that says where."""

import gzip
import io
import json
import random
import re
import tarfile

import pytest
import webdataset
from corpus_builders import found_in, packed, tar_bytes, write_file

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare import rules, source_of
from phalanx.data.prepare.inputs import CorruptInput, Fields
from phalanx.data.prepare.inputs.samples import split_name

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
SAMPLES = [(f"{number:03d}.txt", f"text {number}".encode() * 40) for number in range(8)]


def error_of(tmp_path, data, name="a.tar"):
    """The error that reading a tar raises, after which no document more came; its one line."""
    with pytest.raises(PhalanxError) as error:
        found_in(write_file(tmp_path, name, data))
    assert "\n" not in str(error.value) and name in str(error.value)
    return error.value


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("a/v1.2_doc.json", ("a/v1", "2_doc.json")),
        ("a.b/c.d/v1.txt", ("a.b/c.d/v1", "txt")),
        ("./a.tar.gz", ("a", "tar.gz")),
        ("README", ("README", "")),
        ("a/.hidden.txt", ("a/", "hidden.txt")),
    ],
)
def test_member_name_is_split_at_the_first_dot_of_its_last_part(name, split):
    """Case 7."""
    assert split_name(name) == split


@pytest.mark.parametrize("form", FORMATS)
def test_tar_names_with_dots_follow_the_rule(tmp_path, form):
    """Case 7: also names too long for a plain header, names that are no Unicode, and folders among the members."""
    long = "d" * 120 + "/" + "n" * 90
    members = [
        ("a/v1.2_doc.json", b'{"text": "one"}'),
        ("a/v2.2_doc.json", b'{"text": "two", "id": "a/v2.2"}'),
        ("./b.orig.txt", b"three"),
        (f"{long}.txt", b"four"),
        ("caf\udce9.txt", b"five"),
        (".hidden.txt", b"no"),
        ("x/._b.txt", b"no"),
    ]
    found = found_in(write_file(tmp_path, "w.tar", tar_bytes(members, form)))
    assert found == [
        *(("w.tar:a/v1", "one"), ("a/v2.2", "two"), ("w.tar:b", "three")),
        *((f"w.tar:{long}", "four"), ("w.tar:caf\udce9", "five")),
    ]


def test_tar_sample_of_several_members_gives_its_text_and_its_id(tmp_path):
    members = [
        *(("0.jpg", b"\xff" * 700), ("0.txt", b"caption"), ("0.json", b'{"id": "zero", "text": "not this"}')),
        *(("1.json", b'{"text": "one", "id": 1}'), ("1.cls", b"7")),
        *(("2.txt", b"two"), ("2.json", b"{broken")),
        *(("3.jpg", b"no text"), ("README", b"no text")),
    ]
    found = found_in(write_file(tmp_path, "w.tar", tar_bytes(members)))
    expected = [("zero", "caption"), ("1", "one"), ("w.tar:2", "two"), ("w.tar:3", None), ("w.tar:README", None)]
    assert found == expected


@pytest.mark.parametrize("field", ["text", "body.text"])
def test_tar_json_members_keep_their_text_in_the_chosen_field(tmp_path, field):
    record = {"text": "t"} if field == "text" else {"body": {"text": "t"}}
    file = write_file(tmp_path, "w.tar", tar_bytes([("0.json", json.dumps(record).encode())]))
    assert found_in(file, fields=Fields(field)) == [("w.tar:0", "t")]


def test_tar_links_are_samples_without_text(tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        folder, link = tarfile.TarInfo("d"), tarfile.TarInfo("d/0.txt")
        folder.type, link.type, link.linkname = tarfile.DIRTYPE, tarfile.LNKTYPE, "d/1.txt"
        tar.addfile(folder)
        tar.addfile(link)
    assert found_in(write_file(tmp_path, "w.tar", buffer.getvalue())) == [("w.tar:d/0", None)]


def test_tar_written_by_webdataset_gives_what_webdataset_reads(tmp_path):
    path = tmp_path / "w.tar.gz"
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(20):
            writer.write({"__key__": f"d/{number:03d}", "txt": f"text {number}", "json": {"id": f"id{number}"}})
    read = [(s["json"]["id"], s["txt"]) for s in webdataset.WebDataset(str(path), shardshuffle=False).decode()]
    assert found_in(path) == read and len(read) == 20


def test_tar_member_name_that_comes_twice_raises_with_both_offsets(tmp_path):
    """Case 8."""
    data = tar_bytes([("0.txt", b"a"), ("1.txt", b"b"), ("1.txt", b"c")])
    assert "expected one member called '1.txt'; they lie at bytes 1024 and 2048" in str(error_of(tmp_path, data))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_tar_members_of_a_sample_that_are_apart_raise_with_both_offsets(tmp_path, suffix):
    """Case 8."""
    members = [(f"{number}.txt", b"t") for number in range(9)]
    data = packed(suffix, tar_bytes([*members, ("3.json", b"{}"), ("2.cls", b"1")]))
    error = str(error_of(tmp_path, data, f"a.tar{suffix}"))
    assert "expected the members of a sample next to each other; they lie at bytes 3072 and 9216" in error


def test_tar_sample_with_two_texts_raises_with_both_offsets(tmp_path):
    data = tar_bytes([("v1.0_doc.json", b'{"text": "a"}'), ("v1.1_doc.json", b'{"text": "b"}')])
    error = str(error_of(tmp_path, data))
    assert "expected one .txt or .json member in the sample 'v1'; they lie at bytes 0 and 1024" in error


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_tar_cut_at_any_byte_is_an_error_that_names_the_byte(tmp_path, form, suffix):
    """Case 5: at a member's boundary, in a header, in data, in the end mark; packed or not."""
    data = packed(suffix, tar_bytes(SAMPLES[:3], form))
    stops = range(len(data)) if suffix else [*range(0, 5120, 64), *range(511, 5120, 512), *range(513, 5120, 512)]
    end = len(data) if suffix else tar_bytes(SAMPLES[:3], form).rstrip(b"\0").__len__() // 512 * 512 + 1536
    for stop in stops:
        if stop < min(end, len(data)):
            error = error_of(tmp_path, data[:stop], f"a.tar{suffix}")
            assert isinstance(error, CorruptInput) and error.place <= stop and f"byte {error.place}: " in str(error)


def test_tar_cut_as_packed_data_that_is_whole_names_the_byte_in_the_tar(tmp_path):
    cut = tar_bytes(SAMPLES)[: 3 * 1024]
    error = error_of(tmp_path, gzip.compress(cut), "a.tar.gz")
    assert error.place == 3072 and "expected a whole tar, but it ends there" in str(error)


@pytest.mark.parametrize("offset", [0, 1024, 2048 + 512])
def test_tar_zeroed_or_overwritten_block_is_an_error_or_other_bytes_never_fewer_documents(tmp_path, offset):
    """Case 5: zeros where a header was look like the end to other readers; in a member they are its data (NULs)."""
    data = bytearray(tar_bytes(SAMPLES))
    data[offset : offset + 512] = bytes(512)
    if offset % 1024 == 0:
        assert f"byte {offset}: expected a whole tar, but a block of zeros is there" in str(error_of(tmp_path, data))
        data[offset : offset + 512] = random.Random(0).randbytes(512)
        assert f"byte {offset}: expected a whole tar, but its header there is none" in str(error_of(tmp_path, data))
    else:
        assert len(found_in(write_file(tmp_path, "a.tar", data))) == len(SAMPLES)


def test_tar_any_flipped_header_bit_is_an_error(tmp_path):
    """Case 5: every header is guarded by its checksum, so none is misread as another size or name."""
    data, chance = tar_bytes(SAMPLES), random.Random(0)
    expected = found_in(write_file(tmp_path, "a.tar", data))
    for _ in range(150):
        damaged = bytearray(data)
        damaged[chance.randrange(8) * 1024 + chance.randrange(512)] ^= 1 << chance.randrange(8)
        write_file(tmp_path, "a.tar", damaged)
        try:
            assert found_in(tmp_path / "a.tar") == expected  # of the checksum's own two closing bytes
        except CorruptInput as error:
            assert re.search(r"byte \d+: expected a whole tar", str(error))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (b"99999999999999999999999 path=a\n", "its extended header there is broken"),
        (b"0 path=a\n", "its extended header there is broken"),
        (b"107 size=" + b"9" * 97 + b"\n", "a sparse member or one without a size"),
        (b"12 size=-5x\n", "a sparse member or one without a size"),
        (b"22 GNU.sparse.major=1\n", "a sparse member"),
    ],
)
def test_tar_extended_header_that_lies_is_an_error(tmp_path, block, message):
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, len(block)
    data = header.tobuf(tarfile.USTAR_FORMAT) + block.ljust(512, b"\0") + tar_bytes(SAMPLES)
    assert message in str(error_of(tmp_path, data))


@pytest.mark.parametrize("type_of", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE])
@pytest.mark.parametrize("size", [-1, -(2**40), 2**62])
def test_tar_header_with_a_size_that_cannot_be_is_an_error(tmp_path, type_of, size):
    header = tarfile.TarInfo("x.txt")
    header.type, header.size = type_of, size
    data = header.tobuf(tarfile.GNU_FORMAT) + tar_bytes(SAMPLES)
    assert isinstance(error_of(tmp_path, data), CorruptInput)


def test_tar_of_many_samples_is_read_in_order_and_counted(tmp_path):
    members = [(f"{number:06d}.txt", b"" if number % 10 == 0 else b"text") for number in range(2000)]
    source = source_of(write_file(tmp_path, "a.tar", tar_bytes(members)))
    counts = dict.fromkeys([rules.ZERO_BYTES, *rules.MENDED], 0)
    texts = [rules.clean(each, counts) for each in source.documents()]
    assert len(texts) == 2000 and counts[rules.ZERO_BYTES] == texts.count(None) == 200
