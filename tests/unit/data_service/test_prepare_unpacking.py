"""gzip and Zstandard inputs: many frames, and no cut or damage is taken for the end."""

import gzip
import io
import random

import pytest
import zstandard
from corpus_builders import RECORDS, found_in, json_lines, packed, write_file

from phalanx.data.prepare.inputs import CorruptInput
from phalanx.data.prepare.inputs.unpacking import unpacked

EXPECTED = [(record["id"], record["text"]) for record in RECORDS]
SKIPPABLE = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"extra"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_file_cut_at_any_byte_is_an_error_that_names_the_byte(tmp_path, suffix):
    data = packed(suffix, json_lines())
    for stop in range(len(data)):
        file = write_file(tmp_path, f"a.jsonl{suffix}", data[:stop])
        with pytest.raises(
            CorruptInput, match=rf"a\.jsonl{suffix}, byte \d+: expected a whole (gzip|Zstandard) file"
        ) as error:
            found_in(file)
        assert error.value.place == stop and "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_file_of_several_frames_is_read_to_its_end(tmp_path, suffix):
    parts = [packed(suffix, json_lines(RECORDS[start : start + 2])) for start in range(0, 9, 2)]
    between = SKIPPABLE if suffix == ".zst" else gzip.compress(b"")
    assert found_in(write_file(tmp_path, f"a.jsonl{suffix}", between.join(parts))) == EXPECTED
    with pytest.raises(CorruptInput, match="ends in the middle"):
        found_in(write_file(tmp_path, f"a.jsonl{suffix}", b"".join(parts)[:-3]))


def test_gzip_padding_of_zeros_is_passed_over_and_other_bytes_behind_it_are_not(tmp_path):
    data = packed(".gz", json_lines()) + bytes(100_000)
    assert found_in(write_file(tmp_path, "a.jsonl.gz", data)) == EXPECTED
    with pytest.raises(CorruptInput, match=f"byte {len(data)}: .* no gzip"):
        found_in(write_file(tmp_path, "a.jsonl.gz", data + b"garbage"))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_file_with_any_flipped_bit_gives_an_error_or_the_same_documents(tmp_path, suffix):
    """Both formats carry a checksum here; bits that mean nothing (a time, a name) may flip."""
    plain = json_lines(RECORDS * 5)
    data = gzip.compress(plain) if suffix == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress(plain)
    chance, num_errors = random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        try:
            assert unpacked(io.BytesIO(damaged), suffix[1:], "a").read() == plain
        except CorruptInput:
            num_errors += 1
    assert num_errors > 250


def test_zstandard_file_with_a_long_window_is_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters)
    data = packer.compressobj()
    packed_lines = data.compress(json_lines()) + data.flush()
    assert found_in(write_file(tmp_path, "a.jsonl.zst", packed_lines)) == EXPECTED


@pytest.mark.parametrize(("suffix", "data"), [(".gz", b"not gzip at all"), (".zst", b"not zstd at all")])
def test_file_that_is_not_what_its_suffix_says_is_an_error_at_its_first_byte(tmp_path, suffix, data):
    with pytest.raises(CorruptInput, match="byte 0: expected a whole"):
        found_in(write_file(tmp_path, f"a.txt{suffix}", data))
