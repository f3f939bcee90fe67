"""Run by the peers' Python: writes token datasets with their real libraries, and what their real readers return.

`token_fixtures.py FOLDER` makes, for each case, `FOLDER/<case>/` with the dataset and `FOLDER/<case>.npz` with the
reader's rows: `tokens` int64, all rows one after the other, and `lengths` int64; and `FOLDER/versions.json`.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

VOCAB_SIZE, EOS = 50_000, 7
SEED = 20


def _stand_in(name: str, folder: Path | None = None, **attributes: object) -> None:
    """A module with nothing but what is given: what a peer imports for pictures or models, which tokens don't need."""
    module = types.ModuleType(name)
    module.__path__ = [] if folder is None else [str(folder)]
    for key, value in attributes.items():
        setattr(module, key, value)
    sys.modules[name] = module


def _rows(num_rows: int, longest: int = 200, *, with_eos: bool = True) -> list[np.ndarray]:
    generator = np.random.default_rng(SEED)
    rows = [generator.integers(8, VOCAB_SIZE, int(length)) for length in generator.integers(1, longest, num_rows)]
    for row in rows:
        if with_eos:
            row[-1] = EOS
    rows[0][0], rows[-1][0] = 0, VOCAB_SIZE - 1
    return rows


def _packed(width: int, num_rows: int) -> np.ndarray:
    """Rows of one width that documents run across, as a concatenating tokenizer writes them."""
    tokens = np.concatenate(_rows(num_rows * width // 20, 100))[: width * num_rows]
    return tokens.reshape(-1, width)


def _mds(folder: Path) -> dict[str, list[np.ndarray]]:
    from streaming import MDSWriter, StreamingDataset

    def write(case: str, columns: dict[str, str], samples: Iterator[dict[str, object]], **options: object) -> None:
        with MDSWriter(out=str(folder / case), columns=columns, size_limit=1 << 14, **options) as writer:
            for sample in samples:
                writer.write(sample)

    def read(case: str, decode: Callable[[object], np.ndarray] = np.asarray) -> list[np.ndarray]:
        source = StreamingDataset(
            remote=str(folder / case), local=str(folder / "cache" / case), shuffle=False, batch_size=1
        )
        return [decode(source[number]["tokens"]) for number in range(source.num_samples)]

    rows = _rows(300)
    write(
        "mds_ndarray", {"tokens": "ndarray:int32"}, ({"tokens": row.astype(np.int32)} for row in rows), hashes=["sha1"]
    )
    write(
        "mds_columns",
        {"text": "str", "tokens": "ndarray", "name": "str", "weight": "float32"},
        (
            {
                "text": "x" * (number % 7),
                "tokens": row.astype([np.uint16, np.int64][number % 2]),
                "name": f"é.{number}",
                "weight": 0.5,
            }
            for number, row in enumerate(rows)
        ),
        hashes=["md5", "xxh3_64"],
    )
    fixed = _packed(64, 200).astype(np.uint16)
    write("mds_fixed", {"tokens": "ndarray:uint16:64"}, ({"tokens": row} for row in fixed))
    write("mds_bytes", {"tokens": "bytes"}, ({"tokens": row.tobytes()} for row in rows))
    for compression in ("zstd:7", "gz:6", "bz2:5", "br:3", "snappy"):
        write(
            f"mds_{compression.split(':')[0]}",
            {"tokens": "ndarray:uint32"},
            ({"tokens": row.astype(np.uint32)} for row in rows),
            compression=compression,
            hashes=["sha256"],
        )
    cases = {case: read(case) for case in ("mds_ndarray", "mds_columns", "mds_fixed")}
    cases |= {f"mds_{name}": read(f"mds_{name}") for name in ("zstd", "gz", "bz2", "br", "snappy")}
    return {**cases, "mds_bytes": read("mds_bytes", lambda data: np.frombuffer(data, np.int64))}


def _megatron(folder: Path) -> dict[str, list[np.ndarray]]:
    import megatron
    import torch

    core = Path(next(iter(megatron.__path__))) / "core"
    _stand_in("megatron.core", core)
    _stand_in("megatron.core.utils", log_single_rank=lambda *_, **__: None)
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    cases: dict[str, list[np.ndarray]] = {}
    for dtype in (np.uint16, np.int32, np.int64):
        case = f"megatron_{np.dtype(dtype).name}"
        (folder / case).mkdir()
        prefix = str(folder / case / "corpus_text_document")
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=dtype is np.int64)
        for number, row in enumerate(_rows(300)):
            cut = len(row) // 3 if number % 3 == 0 else 0  # every third document has two sequences
            lengths = [cut, len(row) - cut] if cut else [len(row)]
            modes = [0] * len(lengths) if dtype is np.int64 else None
            builder.add_document(torch.tensor(row), lengths, modes)
            if number % 50 == 49:
                builder.end_document()  # a document without a sequence
        builder.finalize(f"{prefix}.idx")
        source = IndexedDataset(prefix, multimodal=dtype is np.int64)
        found = [source[number] for number in range(len(source))]  # views of files that are unmapped with the reader
        sequences = [np.array(each[0] if isinstance(each, tuple) else each) for each in found]
        bounds = source.document_indices.tolist()
        cases[f"{case}_sequences"] = sequences
        cases[case] = [
            np.concatenate([np.empty(0, np.int64), *sequences[start:stop]])
            for start, stop in itertools.pairwise(bounds)
        ]
    return cases


def _hugging_face(folder: Path) -> dict[str, list[np.ndarray]]:
    import datasets

    datasets.disable_progress_bars()
    rows = [*_rows(2500), np.empty(0, np.int64)]
    names = [f"row/{number}" for number in range(len(rows))]
    columns = {"text": ["ü"] * len(rows), "input_ids": [row.tolist() for row in rows], "name": names}

    def features(kind: str) -> datasets.Features:
        text = datasets.Value("string")
        return datasets.Features({"text": text, "input_ids": datasets.List(datasets.Value(kind)), "name": text})

    made = datasets.Dataset.from_dict(columns, features=features("int32"))
    made.save_to_disk(str(folder / "hf_saved"), num_shards=3)
    made.shuffle(seed=1).select(range(1000)).save_to_disk(str(folder / "hf_selected"))
    wide = datasets.Dataset.from_dict(columns, features=features("uint16"))
    wide.save_to_disk(str(folder / "hf_uint16"))
    (folder / "hf_parquet").mkdir()
    for number in range(2):
        made.shard(2, number, contiguous=True).to_parquet(
            str(folder / "hf_parquet" / f"part-{number:05d}.parquet"), batch_size=300
        )
    width = 32
    fixed = datasets.Dataset.from_dict(
        {"input_ids": _packed(width, 500).tolist()},
        features=datasets.Features({"input_ids": datasets.List(datasets.Value("int64"), length=width)}),
    )
    fixed.save_to_disk(str(folder / "hf_packed"), num_shards=4)

    def ids(source: datasets.Dataset) -> list[np.ndarray]:
        return [np.array(row, np.int64) for row in source["input_ids"]]

    saved = ("hf_saved", "hf_selected", "hf_uint16", "hf_packed")
    cases = {case: ids(datasets.load_from_disk(str(folder / case))) for case in saved}
    parts = sorted(str(path) for path in (folder / "hf_parquet").glob("*.parquet"))
    cases["hf_parquet"] = ids(datasets.Dataset.from_parquet(parts, cache_dir=str(folder / "cache")))
    return cases


def _numpy(folder: Path) -> dict[str, list[np.ndarray]]:
    rows = _rows(400)
    flat, packed = np.concatenate(rows), _packed(128, 100)
    folder.joinpath("npy").mkdir()
    np.save(folder / "npy" / "flat.npy", flat.astype(np.uint32))
    folder.joinpath("npy_rows").mkdir()
    np.save(folder / "npy_rows" / "rows.npy", packed.astype(">i4"))
    folder.joinpath("raw").mkdir()
    flat.astype(np.uint16).tofile(folder / "raw" / "train.bin")
    memmap = np.memmap(folder / "raw" / "train.bin", dtype=np.uint16, mode="r")
    return {
        "npy": [np.load(folder / "npy" / "flat.npy", mmap_mode="r")],
        "npy_rows": list(np.load(folder / "npy_rows" / "rows.npy", mmap_mode="r")),
        "raw": [np.asarray(memmap)],
    }


def _store(folder: Path, case: str, rows: Sequence[np.ndarray]) -> None:
    tokens = np.concatenate([np.empty(0, np.int64), *rows])
    np.savez(folder / f"{case}.npz", tokens=tokens, lengths=np.array([len(row) for row in rows]))


def main(folder: Path) -> None:
    """Makes all cases."""
    (folder / "cache").mkdir(parents=True)
    cases = _numpy(folder) | _hugging_face(folder) | _megatron(folder)
    for name, attributes in {
        "torchvision": {},
        "torchvision.datasets": {"VisionDataset": object},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {"to_tensor": None},
        "transformers": {},
        "transformers.models": {},
        "transformers.models.auto": {},
        "transformers.models.auto.tokenization_auto": {"AutoTokenizer": None},
        "transformers.feature_extraction_utils": {"BatchFeature": type("BatchFeature", (), {})},
        "transformers.tokenization_utils_base": {"BatchEncoding": type("BatchEncoding", (), {})},
    }.items():
        _stand_in(name, **attributes)
    cases |= _mds(folder)
    for case, rows in cases.items():
        _store(folder, case, rows)
    peers = ("mosaicml-streaming", "megatron-core", "datasets")
    versions = {name: importlib.metadata.version(name) for name in peers}
    (folder / "versions.json").write_text(json.dumps(versions))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
