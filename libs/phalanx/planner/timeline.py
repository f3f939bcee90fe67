"""A simulated pipeline step as a picture: SVG, or lines of a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from xml.sax.saxutils import escape

from phalanx.planner.pipeline import Interval, PipelineRun, RankRun
from phalanx.planner.pipeline_order import Kind

_COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#f58518",
    Kind.BACKWARD_INPUT: "#eeca3b",
    Kind.BACKWARD_WEIGHT: "#54a24b",
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, inputs",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}
# Later stages of a rank are drawn paler.
_PALEST = 0.45
_MOST_BOXES = 6_000
_LABEL_WIDTH, _ROW, _GAP, _TOP, _BOTTOM = 64, 22, 6, 44, 46
_NARROWEST = 24


def svg(run: PipelineRun, *, width: int = 1200) -> str:
    """The step as an SVG document, one row a rank: boxes with stage and micro-batch as their tooltip.

    width: pixels. Of more than 6,000 actions, neighbours of one kind are drawn as one box.
    """
    scale = (width - _LABEL_WIDTH - 8) / run.makespan_s
    height = _TOP + len(run.ranks) * (_ROW + _GAP) + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="18" font-size="13">{escape(headline(run))}</text>',
        *_legend(run),
    ]
    together = sum(len(rank.intervals) for rank in run.ranks) > _MOST_BOXES
    for rank in run.ranks:
        parts += _row(rank, run, scale, together=together)
    parts += [*_axis(run, scale, height), "</svg>"]
    return "\n".join(parts) + "\n"


def headline(run: PipelineRun) -> str:
    """Schedule, counts, seconds and bubble in one line."""
    ranks = len(run.ranks)
    return (
        f"{run.schedule}: {ranks} pipeline {'rank' if ranks == 1 else 'ranks'}, {run.micro_batches} micro-batches, "
        f"{seconds(run.makespan_s)}, {run.bubble_fraction:.1%} bubble"
    )


def seconds(value: float) -> str:
    """A duration as people write it: 12.3 s, 4.56 ms, 78.9 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def _legend(run: PipelineRun) -> Iterator[str]:
    kinds = {each.action.kind for rank in run.ranks for each in rank.intervals}
    x = 8
    for kind in (kind for kind in Kind if kind in kinds):
        yield f'<rect x="{x}" y="26" width="10" height="10" fill="{_COLOURS[kind]}"/>'
        yield f'<text x="{x + 14}" y="35">{_NAMES[kind]}</text>'
        x += 30 + 6 * len(_NAMES[kind])


def _row(rank: RankRun, run: PipelineRun, scale: float, *, together: bool) -> Iterator[str]:
    y = _TOP + rank.pp_rank * (_ROW + _GAP)
    stages = sorted({each.action.stage for each in rank.intervals})
    yield f'<text x="8" y="{y + 15}">rank {rank.pp_rank}</text>'
    yield f'<rect x="{_LABEL_WIDTH}" y="{y}" width="{run.makespan_s * scale:.1f}" height="{_ROW}" fill="#eeeeee"/>'
    for kind, stage, start, end, said in _boxes(rank, together=together):
        x, wide = _LABEL_WIDTH + start * scale, (end - start) * scale
        solid = 1.0 - (1.0 - _PALEST) * stages.index(stage) / max(1, len(stages) - 1)
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW}" fill="{_COLOURS[kind]}" '
            f'fill-opacity="{solid:.2f}" stroke="white" stroke-width="0.5"><title>{said}</title></rect>'
        )
        label = said.rsplit(" ", 1)[-1]
        if not together and wide > 7 * len(label) + 3:
            yield f'<text x="{x + wide / 2:.2f}" y="{y + 15}" text-anchor="middle">{label}</text>'


def _boxes(rank: RankRun, *, together: bool) -> Iterator[tuple[Kind, int, float, float, str]]:
    """(kind, stage, start, end, tooltip) of what is drawn."""
    if not together:
        for each in rank.intervals:
            kind, stage, micro_batch, _ = each.action
            yield kind, stage, each.start_s, each.end_s, f"{_NAMES[kind]}, stage {stage}, micro-batch {micro_batch}"
        return
    for touching in _touching(rank):
        first = touching[0].action
        yield (
            first.kind,
            first.stage,
            touching[0].start_s,
            touching[-1].end_s,
            f"{len(touching)} x {_NAMES[first.kind]}, stage {first.stage}",
        )


def _touching(rank: RankRun) -> Iterator[list[Interval]]:
    """Neighbours of one kind and stage, without a gap between them."""
    for _, alike in groupby(rank.intervals, key=lambda each: (each.action.kind, each.action.stage)):
        block: list[Interval] = []
        for each in alike:
            if block and each.start_s > block[-1].end_s:
                yield block
                block = []
            block.append(each)
        yield block


def _axis(run: PipelineRun, scale: float, height: int) -> Iterator[str]:
    y = height - _BOTTOM + 4
    step = _round_step(run.makespan_s / 8)
    for tick in range(math.floor(run.makespan_s / step) + 1):
        x = _LABEL_WIDTH + tick * step * scale
        label = seconds(tick * step) if tick else "0"
        yield f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{y}" stroke="black" stroke-opacity="0.15"/>'
        yield f'<text x="{x:.1f}" y="{y + 14}" text-anchor="middle">{label}</text>'
    most = max(rank.peak_bytes for rank in run.ranks)
    fullest = next(rank.pp_rank for rank in run.ranks if rank.peak_bytes == most)
    yield f'<text x="{_LABEL_WIDTH}" y="{y + 32}">most activations at once: {amount(most)} on rank {fullest}</text>'


def amount(held: float) -> str:
    """Bytes in GB, or passes where costs gave no bytes (below a thousand)."""
    return f"{held / 1e9:.3g} GB" if held >= 1e6 else f"{held:g} passes"


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def terminal(run: PipelineRun, *, width: int = 80) -> str:
    """The step as lines of at most `width` characters, one a rank.

    A forward shows the last digit of its micro-batch; a backward the letter at its place in the alphabet: lower case
    whole or of inputs, W of weights. Idle: a dot. Below 24 characters: how busy each rank is, in percent.
    """
    label = len(str(len(run.ranks) - 1)) + 1
    columns = width - label
    if width < _NARROWEST:
        return "\n".join(f"{rank.pp_rank} {rank.busy_s / run.makespan_s:.0%}"[:width] for rank in run.ranks) + "\n"
    lines = [
        f"{rank.pp_rank:<{label}}" + "".join(_cells(rank, run.makespan_s / columns, columns)) for rank in run.ranks
    ]
    key = "0-9 forward, a-z backward, W weights, . idle"
    said = [headline(run), key] if width >= len(headline(run)) else [f"{run.bubble_fraction:.1%} bubble"]
    return "\n".join([*(line[:width] for line in said), *lines]) + "\n"


def _cells(rank: RankRun, column_s: float, columns: int) -> Iterator[str]:
    """What the rank does at the middle of each column."""
    intervals, at = rank.intervals, 0
    for column in range(columns):
        middle = (column + 0.5) * column_s
        while at < len(intervals) and intervals[at].end_s <= middle:
            at += 1
        if at == len(intervals) or intervals[at].start_s > middle:
            yield "."
            continue
        kind, _, micro_batch, _ = intervals[at].action
        if kind is Kind.FORWARD:
            yield str(micro_batch % 10)
        else:
            yield "W" if kind is Kind.BACKWARD_WEIGHT else chr(ord("a") + micro_batch % 26)
