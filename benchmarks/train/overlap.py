"""How much of the communication of sharded data parallelism has computation beside it, with the overlap and without.

Two ranks train a small decoder by FSDP2 (zero 3) in turns with the overlap and with each collective awaited where it
begins; torch's profiler measures the last steps. Or it reads traces that `phalanx job profile --out` downloaded.
A picture of one step of rank 0, both ways, goes to `--picture`.

OMP_NUM_THREADS=1 python benchmarks/train/overlap.py FOLDER [--rounds 3] [--picture FILE.svg]
python benchmarks/train/overlap.py --traces traces/*-trace.json
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from traced import ranks

from phalanx.telemetry.trace import Span, Timeline, intersection, timeline, total, union

WORLD_SIZE, STEPS, WARM_UP, PROFILED = 2, 6, 2, 2
JOB = {
    "job": {"name": "overlap", "storage": "memory://overlap"},
    "model": {"args": {"dim": 512, "n_layers": 8, "n_heads": 8, "ffn_dim": 1408, "vocab_size": 2048}},
    "data": {"train": "memory://overlap/train"},
    "training": {"seq_len": 64, "steps": 1, "global_batch_size": 8, "mixed_precision_param": "float32"},
    "optimizer": {"lr": 1e-3},
    "parallel": {"local_batch_size": 4},
    "cluster": {"nproc": WORLD_SIZE},
}
WAYS = {"overlapped": True, "awaited": False}
WIDTH, ROW, LEFT, GAP = 1000, 22, 130, 0.5
COLOURS = {"computing": "#3b7dd8", "communicating": "#e08e2b"}


def told(name: str, read: Timeline) -> str:
    """One line."""
    steps_us, busy_us = total(read.steps), total(read.communicating)
    return (
        f"{name}: communication {busy_us / 1e3:.0f} ms of {steps_us / 1e3:.0f} ms, computation "
        f"{total(read.computing) / 1e3:.0f} ms beside {100 * read.share_beside:.0f} % of it"
    )


def measure(folder: Path, rounds: int) -> dict[str, list[Timeline]]:
    """Timelines of rank 0 by way, each round one of each."""
    found: dict[str, list[Timeline]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, overlap in WAYS.items():
            traces = folder / way
            traces.mkdir(parents=True, exist_ok=True)
            asked = {
                "job": JOB,
                "model": {"overlap": overlap},
                "steps": STEPS,
                "profiled": PROFILED,
                "traces": str(traces),
            }
            reported = ranks(WORLD_SIZE, asked)
            step_s = statistics.median(reported[0]["seconds"][WARM_UP:])
            print(f"{way}: step {step_s:.3f} s, load {os.getloadavg()[0]:.1f}", flush=True)
            for rank in range(WORLD_SIZE):
                read = timeline((traces / f"r{rank}.json").read_bytes())
                print("  " + told(f"rank {rank}", read), flush=True)
                if rank == 0:
                    found[way].append(read)
    return found


def joined(spans: Sequence[Span], gap: float) -> Sequence[Span]:
    """Spans of which none is nearer to the next than a gap that can be seen."""
    return [(begin, end - gap) for begin, end in union((begin, end + gap) for begin, end in spans)]


def picture(found: dict[str, Timeline]) -> str:
    """The last step of each, one above the other, in the same scale."""
    steps = {way: read.steps[-1] for way, read in found.items()}
    scale = (WIDTH - LEFT) / max(end - begin for begin, end in steps.values())
    parts, at = [], 10
    for way, read in found.items():
        begin, end = steps[way]
        parts.append(f'<text x="0" y="{at + 12}" font-weight="bold">{way}, {(end - begin) / 1e3:.0f} ms</text>')
        for kind, colour in COLOURS.items():
            at += ROW
            parts.append(f'<text x="0" y="{at + 13}">{kind}</text>')
            spans: Sequence[Span] = intersection(getattr(read, kind), [(begin, end)])
            for first, last in joined(spans, GAP / scale):
                x, width = LEFT + (first - begin) * scale, max((last - first) * scale, GAP)
                parts.append(f'<rect x="{x:.1f}" y="{at}" width="{width:.1f}" height="{ROW - 6}" fill="{colour}"/>')
        at += 2 * ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {at}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{at}" fill="white"/>', *parts, "</svg>\n"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--traces", type=Path, nargs="+", default=[])
    options = parser.parse_args(arguments)
    for path in options.traces:
        print(told(path.name, timeline(path.read_bytes())))
    if options.folder is None:
        return
    found = measure(options.folder, options.rounds)
    for way, rounds in found.items():
        shares = [100 * each.share_beside for each in rounds]
        print(f"{way}: {statistics.median(shares):.0f} % ({min(shares):.0f} to {max(shares):.0f}) beside computation")
    if options.picture is not None:
        options.picture.write_text(picture({way: rounds[-1] for way, rounds in found.items()}))


if __name__ == "__main__":
    main()
