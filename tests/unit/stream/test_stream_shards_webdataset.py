"""Shards as the plain `webdataset` library, `tarfile` and numpy see them, and what they cost beside the tokens."""

import io
import tarfile

import numpy as np
import pytest
import webdataset

from phalanx.stream.shards import DEFAULT_MEMBER_BYTES, ShardBuilder, token_dtype

RNG = np.random.default_rng(11)


def built(lengths, vocab_size=50_000, member_bytes=DEFAULT_MEMBER_BYTES, name="train-00000000"):
    """The documents, and the shard that holds them."""
    builder = ShardBuilder(name, token_dtype(vocab_size), member_bytes)
    documents = [RNG.integers(0, vocab_size, length) for length in lengths]
    for number, tokens in enumerate(documents):
        builder.add(f"a/v1.{number}.txt", tokens)
    return documents, builder.finish()


@pytest.mark.parametrize("vocab_size", [65_536, 65_537])
def test_shard_read_by_plain_webdataset_gives_every_document(tmp_path, vocab_size):
    """Case 7 too: ids with dots are in no member's name."""
    documents, shard = built([3, 700, 1, 5000, 20, 9], vocab_size, member_bytes=4096)
    (tmp_path / "train-00000000.tar").write_bytes(shard.tar)
    samples = list(webdataset.WebDataset([str(tmp_path / "train-00000000.tar")], shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == [f"train-00000000-{k:06d}" for k in range(len(samples))]
    assert {key for sample in samples for key in sample if key[0] != "_"} == {"tokens.npy", "bounds.npy"}
    assert {sample["tokens.npy"].dtype for sample in samples} == {token_dtype(vocab_size)}
    read = [part for s in samples for part in np.split(s["tokens.npy"], s["bounds.npy"][:-1])]
    assert [part.tolist() for part in read] == [document.tolist() for document in documents]


def test_shards_several_read_by_plain_webdataset_through_batches_and_tuples(tmp_path):
    """The pipeline that people already have: brace expansion, to_tuple, batched."""
    expected = []
    for number in range(3):
        documents, shard = built([40] * 30, member_bytes=1024, name=f"train-{number:08d}")
        (tmp_path / f"train-{number:08d}.tar").write_bytes(shard.tar)
        expected.append(np.concatenate(documents))
    url = f"{tmp_path}/train-{{00000000..00000002}}.tar"
    pipeline = webdataset.WebDataset(url, shardshuffle=False).decode().to_tuple("tokens.npy", "bounds.npy")
    tokens = [tokens for batch in pipeline.batched(4, collation_fn=None) for tokens, _ in batch]
    assert np.concatenate(tokens).tolist() == np.concatenate(expected).tolist()


def test_shard_read_by_tarfile_and_numpy_alone():
    documents, shard = built([40] * 30, member_bytes=1024)
    with tarfile.open(fileobj=io.BytesIO(shard.tar)) as tar:
        arrays = [np.load(io.BytesIO(tar.extractfile(name).read())) for name in tar.getnames() if "tokens" in name]
    assert np.concatenate(arrays).tolist() == np.concatenate(documents).tolist()


def overhead(lengths, vocab_size=50_000):
    """Bytes of a tar beyond its tokens, as a share of the tokens' bytes."""
    _, shard = built(lengths, vocab_size)
    token_bytes = shard.num_tokens * token_dtype(vocab_size).itemsize
    return (len(shard.tar) - token_bytes) / token_bytes


def test_shard_of_documents_as_the_web_has_them_costs_below_one_percent():
    """Log-normal lengths with a median of 450 tokens and a mean of 830, as crawled pages have."""
    lengths = np.clip(RNG.lognormal(6.1, 1.1, 9000), 1, 200_000).astype(int)
    assert 0.002 < overhead(lengths) < 0.01
    assert overhead(lengths, 100_000) < 0.005


@pytest.mark.parametrize(("vocab_size", "shortest"), [(50_000, 256), (100_000, 128)])
def test_shard_of_short_documents_costs_one_percent_where_the_format_says(vocab_size, shortest):
    """Bounds of 4 bytes a document are what is left to pay when members are full."""
    assert 0.0085 < overhead([shortest] * 30_000, vocab_size) < 0.01
    assert overhead([shortest // 2] * 30_000, vocab_size) > 0.01


def test_shard_of_half_a_megabyte_of_tokens_is_the_smallest_that_costs_below_one_percent():
    assert overhead([700] * 375) < 0.01 < overhead([700] * 150)
