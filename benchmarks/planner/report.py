"""The scoreboard as a part of docs/planner.md and as a picture."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from phalanx.core.errors import PhalanxError
from phalanx.core.files import write_output

from .score import Line, Ranking, Score

BEGIN, END = "<!-- scoreboard: begin -->", "<!-- scoreboard: end -->"
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#9c6b4e", "#97bbf5", "#9498a0")
_SIZE, _MARGIN = 420, 44
_INTRODUCTION = """\
{rows} of {all} rows have a step time that counts. Mean absolute error of seconds a step. *Shipped*: with the numbers in
the code, which were fitted on these rows. *By source*: each source predicted by numbers fitted on the sources outside
its fold (5 folds), so mostly without its stack. *By family*: the same by families of configurations, so that the stack
may have been seen. *Constant*: operations over a constant share of the peak, the median of the other sources' on the
same kind of GPU.
"""


def update(page: Path, text: str) -> None:
    """Puts the text between the page's two marks. Raises PhalanxError for a page without them."""
    old = page.read_text()
    if BEGIN not in old or END not in old:
        raise PhalanxError("--page", value=str(page), expected=f"a page with {BEGIN} and {END}", remedy="add them")
    before, rest = old.split(BEGIN, 1)
    write_output(page, f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}".encode())


def markdown(score: Score, ranking: Ranking, picture: str, num_worst: int = 12) -> str:
    """The scoreboard's text."""
    memory = score.memory
    parts = [_INTRODUCTION.format(rows=len(score.rows), all=score.num_rows)]
    for title, lines in score.lines().items():
        parts.append(_table(title, lines))
    parts.append(
        f"Memory: {memory.error:.1%} mean absolute error on {memory.rows} peaks; {memory.called} of "
        f"{memory.out_of_memory} runs that ran out of memory are called, with {memory.false_alarms} false alarms on "
        f"{memory.fitting} that fitted.\n"
    )
    if ranking.sets:
        parts.append(
            f"Choice among rivals: {ranking.sets} sets of layouts of one model on one cluster; what the planner would "
            f"choose is {ranking.regret:.1%} slower than the best on average, {ranking.worst:.1%} at most.\n"
        )
    parts.append(f"![predicted and measured seconds a step]({picture})\n")
    parts.append(_worst(score, num_worst))
    return "\n".join(parts)


def _table(title: str, lines: list[Line]) -> str:
    head = f"| {title} | rows | shipped | by source | by family | constant |\n|---|---:|---:|---:|---:|---:|\n"
    return head + "".join(
        f"| {line.name} | {line.rows} | {line.shipped:.1%} | {line.by_source:.1%} | {line.by_family:.1%} "
        f"| {line.constant:.1%} |\n"
        for line in lines
    )


def _worst(score: Score, count: int) -> str:
    order = np.argsort(-np.abs(score.shipped))[:count]
    lines = [(score.rows[i].row["id"], score.rows[i].step_s, math.expm1(score.shipped[i])) for i in order]
    rows = "".join(f"| {name} | {seconds:.2f} | {error:+.0%} |\n" for name, seconds, error in lines)
    return f"Worst rows, as shipped:\n\n| row | measured, s | error |\n|---|---:|---:|\n{rows}"


def scatter(score: Score) -> str:
    """Predicted (by source) over measured seconds a step, both logarithmic, as SVG; the lines are 10 % apart from
    equality."""
    measured = np.log10([row.step_s for row in score.rows])
    predicted = measured + score.by_source / math.log(10)
    low = math.floor(min(measured.min(), predicted.min()))
    high = math.ceil(max(measured.max(), predicted.max()))
    span = _SIZE - 2 * _MARGIN

    def at(value: float, *, upward: bool = False) -> float:
        share = (value - low) / (high - low)
        return _SIZE - _MARGIN - share * span if upward else _MARGIN + share * span

    kinds = sorted({row.kind for row in score.rows})
    colour = dict(zip(kinds, _COLOURS, strict=False))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIZE + 80} {_SIZE}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for exponent in range(low, high + 1):
        out.append(f'<text x="{at(exponent):.0f}" y="{_SIZE - 26}" text-anchor="middle">{10.0**exponent:g}</text>')
        out.append(f'<text x="36" y="{at(exponent, upward=True) + 4:.0f}" text-anchor="end">{10.0**exponent:g}</text>')
    for shift in (-math.log10(1.1), 0.0, math.log10(1.1)):
        ends = f'x1="{at(low):.1f}" y1="{at(low + shift, upward=True):.1f}" x2="{at(high):.1f}" '
        out.append(f'<line {ends}y2="{at(high + shift, upward=True):.1f}" stroke="#bbb" stroke-width="0.7"/>')
    for kind in kinds:
        out.append(f'<g fill="{colour[kind]}" fill-opacity="0.6">')
        for row, x, y in zip(score.rows, measured, predicted, strict=True):
            if row.kind == kind:
                out.append(f'<circle cx="{at(x):.1f}" cy="{at(y, upward=True):.1f}" r="2.4"/>')
        out.append("</g>")
    for index, kind in enumerate(kinds):
        y = _MARGIN + 16 * index
        out.append(f'<circle cx="{_SIZE}" cy="{y}" r="4" fill="{colour[kind]}"/>')
        out.append(f'<text x="{_SIZE + 10}" y="{y + 4}">{kind}</text>')
    middle = _SIZE / 2
    out.append(f'<text x="{middle}" y="{_SIZE - 8}" text-anchor="middle">measured, seconds a step</text>')
    out.append(f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">predicted</text>')
    return "\n".join([*out, "</svg>\n"])
