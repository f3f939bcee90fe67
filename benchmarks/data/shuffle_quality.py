"""How well orders mix: ours with several `shuffle_block_shards`, MosaicML's py1e with as many shards in flight, and a
full shuffle. Documents of one length, shards of one size; document i is the i-th of the input.

Run: make setup-test && PYTHONPATH=libs .venv-peers/bin/python benchmarks/data/shuffle_quality.py
It prints the table of docs/data-order.md and writes its picture, docs/pictures/shuffle-quality.svg. py1e is the real
function of the package mosaicml-streaming.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.stream.order import Order
from phalanx.stream.shards import ShardIndex

Sequence = NDArray[np.int64]
BATCH, NUM_SOURCES = 512, 8
LAGS = np.unique(np.geomspace(1, 300_000, 60).astype(int))
PICTURE = Path(__file__).resolve().parents[2] / "docs/pictures/shuffle-quality.svg"
COLOURS = {"ours": ("#9ecae1", "#4292c6", "#2171b5", "#08306b"), "py1e": ("#fdae6b", "#f16913", "#d94801", "#7f2704")}


@dataclass(frozen=True, slots=True)
class Totals:
    """The manifest's totals."""

    shard_tokens: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Quality:
    """Figures of one order.

    neighbours: how far apart, as a share of the epoch, documents of a shard lie that are neighbours in the input (10th
    percentile, median); spread: what share of the epoch one shard's documents span (median); in_flight: most shards
    begun and not ended; same_shard: how often two documents next to each other in the output are of one shard; mix: by
    how much the share of a source in a batch varies, as a multiple of what chance alone gives; autocorrelation: of the
    place in the input, by lag.
    """

    neighbours: tuple[float, float]
    spread: float
    in_flight: int
    same_shard: float
    mix: float
    autocorrelation: NDArray[np.float64]


def ours(num_shards: int, documents: int, seed: int, epoch: int, block: int) -> Sequence:
    """The second epoch of our order."""
    member = np.array([documents], np.uint32)
    index = ShardIndex(np.ones(documents, np.uint32), member, np.zeros(1, np.uint64), np.zeros(1, np.uint64))
    order = Order(Totals(np.full(num_shards, documents)), seed, 1, block, lambda _: index)
    read = order.between(epoch * order.epoch_tokens, (epoch + 1) * order.epoch_tokens)
    return read.shard * documents + read.document


def py1e(num_shards: int, documents: int, seed: int, epoch: int, block: int) -> Sequence:
    """The real py1e, whose block is measured in samples."""
    shuffle = _py1e()
    return np.asarray(shuffle(np.full(num_shards, documents), 1, seed, epoch, block * documents), np.int64)


@cache
def _py1e() -> Callable[..., Sequence]:
    """MosaicML's function, without the rest of its package, which imports torchvision and cloud clients."""
    found = importlib.util.find_spec("streaming")
    if found is None or not found.submodule_search_locations:
        sys.exit("mosaicml-streaming is missing: run `make setup-test`, then this with .venv-peers/bin/python")
    root = Path(next(iter(found.submodule_search_locations)))
    for name, folder in (("streaming", root), ("streaming.base", root / "base")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    shuffle: Callable[..., Sequence] = importlib.import_module("streaming.base.shuffle.py1e").get_shuffle_py1e
    return shuffle


def quality(order: Sequence, documents: int) -> Quality:
    """Measures an order, int64 [n]: the input's number of each document that is read."""
    count = len(order)
    assert (np.sort(order) == np.arange(count)).all()
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    by_shard = place.reshape(-1, documents)
    apart = np.abs(np.diff(by_shard, axis=1)) / count
    first, last = by_shard.min(1), by_shard.max(1)
    steps = np.zeros(count + 1, np.int64)
    np.add.at(steps, first, 1)
    np.add.at(steps, last + 1, -1)
    shard = order // documents
    source = order * NUM_SOURCES // count
    whole = source[: count // BATCH * BATCH].reshape(-1, BATCH)
    shares = np.stack([(whole == number).mean(1) for number in range(NUM_SOURCES)])
    by_chance = np.sqrt((1 / NUM_SOURCES) * (1 - 1 / NUM_SOURCES) / BATCH)
    centred = (order - order.mean()) / order.std()
    return Quality(
        (float(np.percentile(apart, 10)), float(np.median(apart))),
        float(np.median((last - first + 1) / count)),
        int(np.cumsum(steps).max()),
        float((shard[1:] == shard[:-1]).mean()),
        float(shares.std(1).mean() / by_chance),
        np.array([float((centred[lag:] * centred[:-lag]).mean()) for lag in LAGS]),
    )


def rows(num_shards: int, documents: int, seed: int) -> dict[str, Quality]:
    """Every order by its name in the table."""
    size, found = (num_shards, documents, seed, 1), {}
    count = num_shards * documents
    found["as it lies"] = quality(np.arange(count), documents)
    for block in (4, 16, 64, 256):
        found[f"ours, blocks of {block} shards"] = quality(ours(*size, block), documents)
        found[f"py1e, blocks of {block} shards"] = quality(py1e(*size, block), documents)
    found["full shuffle"] = quality(np.random.default_rng(seed).permutation(count), documents)
    return found


def table(found: dict[str, Quality]) -> str:
    """The table of the page, in Markdown."""
    lines = [
        "| order | neighbours apart: 10th percentile, median | a shard spans | shards in flight, at most "
        "| next is of the same shard | mix of sources in a batch | autocorrelation at lag 1, 1,000, 30,000 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, q in found.items():
        lag = [q.autocorrelation[np.searchsorted(LAGS, each)] for each in (1, 1000, 30_000)]
        lines.append(
            f"| {name} | {q.neighbours[0]:.3%}, {q.neighbours[1]:.3%} | {q.spread:.2%} | {q.in_flight:,} "
            f"| {q.same_shard:.2%} | {q.mix:.1f} | {lag[0]:.3f}, {lag[1]:.3f}, {lag[2]:.3f} |"
        )
    return "\n".join(lines)


def picture(found: dict[str, Quality], caption: str) -> str:
    """Autocorrelation by lag, and what each order costs and gives, as SVG."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 980 400" font-family="sans-serif" font-size="12">',
        '<rect width="980" height="400" fill="white"/>',
        f'<text x="490" y="392" text-anchor="middle" fill="#555">{caption}</text>',
    ]
    curves = {name: q for name, q in found.items() if name != "as it lies"}
    parts += _curves(curves)
    parts += _points(curves)
    return "\n".join([*parts, "</svg>\n"])


def _colour(name: str) -> str:
    kind = name.partition(",")[0]
    if kind not in COLOURS:
        return "#2ca02c"
    block = int(name.split()[3])
    return COLOURS[kind][(4, 16, 64, 256).index(block)]


def _curves(found: dict[str, Quality]) -> list[str]:
    left, top, width, height = 60, 40, 400, 290

    def at(lag: float, value: float) -> str:
        x = left + width * np.log10(lag) / np.log10(LAGS[-1])
        return f"{x:.1f},{top + height * (1 - (value + 0.05) / 0.35):.1f}"

    parts = [f'<text x="{left}" y="24" font-weight="bold">Autocorrelation of the place in the input, by lag</text>']
    for value in (0, 0.1, 0.2, 0.3):
        y = at(1, value).split(",")[1]
        parts.append(f'<path d="M{left} {y}H{left + width}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y}" dy="4" text-anchor="end">{value:.1f}</text>')
    for exponent in range(6):
        x = at(10**exponent, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{top + height + 18}" text-anchor="middle">{10**exponent:,}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{top + height + 36}" text-anchor="middle">documents apart</text>')
    for name, q in found.items():
        points = " ".join(at(lag, value) for lag, value in zip(LAGS, q.autocorrelation, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_colour(name)}" stroke-width="1.6"/>')
    return parts


def _points(found: dict[str, Quality]) -> list[str]:
    left, top, width, height = 560, 40, 380, 290

    def at(in_flight: float, mix: float) -> tuple[float, float]:
        return left + width * np.log2(in_flight) / 11, top + height * (1 - np.log2(mix / 0.8) / 4)

    parts = [f'<text x="{left}" y="24" font-weight="bold">Sources in a batch vary by (1: as chance alone)</text>']
    for mix in (1, 2, 4, 8):
        _, y = at(1, mix)
        parts.append(f'<path d="M{left} {y:.1f}H{left + width}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y:.1f}" dy="4" text-anchor="end">{mix}x</text>')
    for shards in (1, 4, 16, 64, 256, 1024):
        x, _ = at(shards, 1)
        parts.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{shards:,}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{top + height + 36}" text-anchor="middle">shards in flight</text>')
    for name, q in found.items():
        x, y = at(q.in_flight, q.mix)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_colour(name)}"/>')
        label = name.replace(", blocks of", "").replace(" shards", "")
        anchor, dx = ("start", 9) if label.startswith("py1e") else ("end", -9)
        parts.append(f'<text x="{x + dx:.1f}" y="{y:.1f}" dy="4" text-anchor="{anchor}">{label}</text>')
    return parts


def main() -> None:
    """Prints the table and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=512)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    found = rows(options.shards, options.documents, options.seed)
    caption = f"{options.shards:,} shards of {options.documents} documents, one epoch; {NUM_SOURCES} sources in a row"
    print(table(found))
    options.picture.write_text(picture(found, f"{caption}; batches of {BATCH}"))
    print(f"\nwrote {options.picture}", file=sys.stderr)


if __name__ == "__main__":
    main()
