"""The shard format: what any WebDataset reader sees, where the bytes lie, and what the strict reading refuses."""

import hashlib
import io
import tarfile

import numpy as np
import pytest
import xxhash

from phalanx.core.errors import PhalanxError
from phalanx.stream import shards
from phalanx.stream.shards import MalformedShard, ShardBuilder, decode_index, parse_shard, token_dtype

RNG = np.random.default_rng(5)


def build(lengths, vocab_size=50_000, member_bytes=4096):
    builder = ShardBuilder("demo-00000000", token_dtype(vocab_size), member_bytes)
    documents = [RNG.integers(0, vocab_size, length) for length in lengths]
    for number, tokens in enumerate(documents):
        builder.add(f"a/v1.{number}_doc.json", tokens)
    return documents, builder.finish()


@pytest.mark.parametrize("vocab_size", [65_536, 65_537])
def test_shard_read_back_gives_the_documents(vocab_size):
    documents, built = build([3, 700, 1, 5000, 20], vocab_size)
    itemsize = token_dtype(vocab_size).itemsize
    assert itemsize == (2 if vocab_size == 65_536 else 4)
    read, index = [], built.index
    for number, member in enumerate(parse_shard(built.tar)):
        read += np.split(member.tokens, member.bounds[:-1])
        assert member.offset == index.member_offsets[number] and member.offset % 64 == 0
        assert xxhash.xxh3_64_intdigest(member.tokens.tobytes()) == index.member_xxh3[number]
    assert [r.tolist() for r in read] == [d.tolist() for d in documents]
    assert index.lengths.tolist() == [3, 700, 1, 5000, 20]
    assert index.member_tokens().sum() == built.num_tokens


def test_shard_document_longer_than_a_member_stays_whole():
    """Case 17: a long document is one member of its own."""
    _, built = build([10, 30_000, 10], member_bytes=1024)
    assert built.index.member_documents.tolist() == [1, 1, 1]


def test_shard_document_above_ten_million_tokens_is_stored_whole():
    """Case 17."""
    builder = ShardBuilder("long", token_dtype(1000))
    builder.add("long", np.full(10_000_001, 7, np.uint16))
    (member,) = parse_shard(builder.finish().tar)
    assert len(member.tokens) == 10_000_001 and member.bounds.tolist() == [10_000_001]


def test_shard_document_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(shards, "MAX_DOCUMENT_TOKENS", 99)
    with pytest.raises(PhalanxError, match="at most 99 tokens"):
        ShardBuilder("long", token_dtype(1000)).add("big.txt", np.zeros(100, np.uint16))


def test_shard_default_member_size_costs_below_one_percent():
    _, built = build([700] * 5000, member_bytes=shards.DEFAULT_MEMBER_BYTES)
    token_bytes = 2 * built.num_tokens
    assert 0 < (len(built.tar) - token_bytes) / token_bytes < 0.01


def test_shard_bytes_are_frozen():
    """Golden: the tar of fixed documents never changes, so a dataset's digest means the same for ever."""
    builder = ShardBuilder("golden-00000000", token_dtype(300), 64)
    for number, length in enumerate([5, 20, 40, 1]):
        builder.add(str(number), np.arange(length))
    built = builder.finish()
    assert hashlib.sha256(built.tar).hexdigest() == GOLDEN_TAR
    assert hashlib.sha256(built.index.encode()).hexdigest() == GOLDEN_INDEX


GOLDEN_TAR = "028101ec4c7e5a9b7163da2c2505d299350d536f16da8b3ee0b7a5c5c083a1f3"
GOLDEN_INDEX = "1060b084f96096661de7c375671bca882836d79be1fb343a561fbbb0bc9cab76"


def test_shard_plain_tarfile_finds_adjacent_pairs():
    """Case 7: keys end at the first dot; ids with dots live in the ids object, never in member names."""
    _, built = build([100] * 100)
    with tarfile.open(fileobj=io.BytesIO(built.tar)) as tar:
        names = tar.getnames()
    keys = [f"demo-00000000-{k:06d}" for k in range(built.index.num_members)]
    assert names == [f"{key}.{kind}.npy" for key in keys for kind in ("tokens", "bounds")]


def tar_of(*files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, array in files:
            data = io.BytesIO()
            np.save(data, np.array(array, np.uint16))
            info = tarfile.TarInfo(name)
            info.size = data.tell()
            tar.addfile(info, io.BytesIO(data.getvalue()))
    return out.getvalue()


def test_parse_duplicate_member_raises_with_both_offsets():
    """Case 8."""
    pair = ("a.tokens.npy", [1]), ("a.bounds.npy", [1])
    with pytest.raises(MalformedShard, match=r"'a.tokens.npy' occurs twice, at bytes 512 and 2560"):
        list(parse_shard(tar_of(*pair, *pair)))


def test_parse_separated_member_raises_with_both_offsets():
    """Case 8."""
    parts = ("a.tokens.npy", [1]), ("b.tokens.npy", [1]), ("a.bounds.npy", [1]), ("b.bounds.npy", [1])
    with pytest.raises(MalformedShard, match=r"'a.tokens.npy' at byte 512: .* found 'b.tokens.npy' at byte 1536"):
        list(parse_shard(tar_of(*parts)))


def damaged(tar, kind):
    second = 512 * (2 + -(-len(tar[512:]) // 512) // 2)
    cut_at_member = tar.index(b"demo-00000000-000001.tokens.npy")
    return {
        "cut at a member border": tar[:cut_at_member],
        "cut in a header": tar[: cut_at_member + 100],
        "zeroed header block": tar[:cut_at_member] + bytes(512) + tar[cut_at_member + 512 :],
        "overwritten header": tar[:cut_at_member] + b"\xff" * 512 + tar[cut_at_member + 512 :],
        "cut in the payload": tar[:second],
        "bytes after the end": tar + b"more",
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "cut at a member border",
        "cut in a header",
        "zeroed header block",
        "overwritten header",
        "cut in the payload",
        "bytes after the end",
    ],
)
def test_parse_damaged_tar_raises(kind):
    """Case 5: what other readers end quietly at."""
    _, built = build([500] * 40)
    with pytest.raises(MalformedShard):
        list(parse_shard(damaged(built.tar, kind)))


def test_index_damaged_or_foreign_is_refused():
    _, built = build([10, 20])
    good = built.index.encode()
    assert decode_index(good).lengths.tolist() == [10, 20]
    with pytest.raises(MalformedShard):
        decode_index(good[:-3])
    lengths = built.index.lengths.copy()
    lengths[0] = 0
    broken = shards.ShardIndex(
        lengths, built.index.member_documents, built.index.member_offsets, built.index.member_xxh3
    )
    with pytest.raises(MalformedShard, match="empty document"):
        decode_index(broken.encode())
