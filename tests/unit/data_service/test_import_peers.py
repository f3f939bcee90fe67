"""What an import gives equals what the original libraries' own readers give: token for token, boundary for boundary.

The datasets are written, and read for comparison, by MosaicML streaming, Megatron-Core, Hugging Face datasets and numpy
themselves, in a Python of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from import_kit import EOS, imported, settings

from phalanx.data.importing import Boundaries

ROOT = Path(__file__).parents[3]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
SCRIPT = ROOT / "tests" / "peers" / "token_fixtures.py"

ROWS = {
    "mds_ndarray": {},
    "mds_columns": {"id_column": "name"},
    "mds_fixed": {},
    "mds_bytes": {"dtype": "int64"},
    **{f"mds_{name}": {} for name in ("zstd", "gz", "bz2", "br", "snappy")},
    **{f"megatron_{name}": {} for name in ("uint16", "int32", "int64")},
    **{f"hf_{name}": {} for name in ("saved", "selected", "uint16", "packed", "parquet")},
    "npy": {"boundaries": Boundaries.ROWS},
    "npy_rows": {},
}
STREAMS = {
    "mds_fixed": {},
    "mds_zstd": {},
    "megatron_uint16": {},
    "hf_packed": {},
    "hf_parquet": {},
    "npy": {},
    "npy_rows": {},
    "raw": {"dtype": "uint16"},
}


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all datasets and what their readers return."""
    if not PEERS.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{PEERS} is not there: make setup-test")
        pytest.skip(f"{PEERS} is not there: make setup-test installs the original libraries")
    folder = tmp_path_factory.mktemp("peers") / "tokens"
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [PEERS, "-W", "ignore", SCRIPT, folder], env=environ, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_original_readers_are_of_the_pinned_versions(peers: Path) -> None:
    pins = (ROOT / "tests" / "peers-requirements.txt").read_text().splitlines()
    for name, version in json.loads((peers / "versions.json").read_text()).items():
        assert f"{name}=={version}" in pins


@pytest.mark.parametrize("case", ROWS)
def test_import_of_rows_equals_the_original_reader(peers: Path, tmp_path: Path, case: str) -> None:
    report, found = imported(peers / case, tmp_path / "out", settings(**ROWS[case]))
    expected = np.load(peers / f"{case}.npz")
    lengths = expected["lengths"]
    assert np.array_equal(found.tokens, expected["tokens"])
    assert np.array_equal(found.lengths, lengths[lengths > 0])
    assert report.counts["empty_documents"] == np.count_nonzero(lengths == 0)
    ends = np.cumsum(lengths)[lengths > 0] - 1
    assert report.counts["documents_without_eos"] == np.count_nonzero(expected["tokens"][ends] != EOS)


@pytest.mark.parametrize("case", STREAMS)
def test_import_by_eos_cuts_the_stream_of_the_original_reader(peers: Path, tmp_path: Path, case: str) -> None:
    _, found = imported(peers / case, tmp_path / "out", settings(**STREAMS[case], boundaries=Boundaries.EOS))
    tokens = np.load(peers / f"{case}.npz")["tokens"]
    files = [tokens]
    if case == "hf_parquet":  # a document ends with its file
        rows = np.load(peers / f"{case}.npz")["lengths"]
        middle = int(rows[: (len(rows) + 1) // 2].sum())
        files = [tokens[:middle], tokens[middle:]]
    lengths: list[int] = []
    for file in files:
        ends = [*(np.flatnonzero(file == EOS) + 1).tolist(), len(file)]
        lengths += [stop - start for start, stop in zip([0, *ends], ends, strict=False) if stop > start]
    assert np.array_equal(found.tokens, tokens)
    assert found.lengths.tolist() == lengths


def test_import_of_megatron_sequences_equals_the_original_reader(peers: Path, tmp_path: Path) -> None:
    prefix = peers / "megatron_int64" / "corpus_text_document"
    _, found = imported(prefix, tmp_path / "out", settings(sequences=True))
    expected = np.load(peers / "megatron_int64_sequences.npz")
    assert np.array_equal(found.tokens, expected["tokens"])
    assert np.array_equal(found.lengths, expected["lengths"])


def test_import_with_an_id_column_keeps_the_ids(peers: Path, tmp_path: Path) -> None:
    _, found = imported(peers / "mds_columns", tmp_path / "mds", settings(id_column="name"))
    assert found.ids == [f"é.{number}" for number in range(300)]
    _, saved = imported(peers / "hf_saved", tmp_path / "hf", settings(id_column="name"))
    assert saved.ids == [f"row/{number}" for number in range(2500)]
