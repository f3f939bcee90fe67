"""Writes the generated layouts and what came of them into docs/layouts.md.

    python scripts/layout_table.py [OUTCOMES] [--check]

The rows are those of tests/distributed/parallel/layout_axes.py, the refusals what `phalanx.spec` said of the pairs that
no row has. OUTCOMES: the file that tests/distributed/parallel/test_layouts.py wrote (`make test-all` names it); rows
that it doesn't have keep the outcome that the page has. --check: only says whether the page has these rows, each of
them equal to one process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "layouts.md"
BEGIN, END = "<!-- generated layouts: begin -->", "<!-- generated layouts: end -->"
FOLDERS = ("tests", "tests/distributed/parallel")
NOT_RUN, EQUAL = "- | - | not run", "equal"
SIZES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# How a value of an axis reads where its name alone doesn't say it.
SAID = {"precision": "", "schedule": "", "document_mask": "no document mask", "uneven_stages": "uneven stages"}


def main(arguments: list[str]) -> int:
    """1 where the page is not fresh, or a layout differs from one process."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    files = [argument for argument in arguments if argument != "--check"]
    told = dict(_kept(old)) | dict(_told(files))
    rows = list(_rows(told))
    page = f"{before}{BEGIN}\n" + "\n".join([*_intro(), *rows, *_refused()]) + f"\n{END}{after}"
    wrong = [row for row in rows if not row.endswith(f"| {EQUAL} |")]
    if page != PAGE.read_text(encoding="utf-8"):
        if "--check" in arguments:
            sys.stderr.write(f"{PAGE.relative_to(ROOT)} is not fresh: run python scripts/layout_table.py\n")
            return 1
        PAGE.write_text(page, encoding="utf-8")
    for row in wrong:
        sys.stderr.write(f"{PAGE.relative_to(ROOT)}: {row}\n")
    return 1 if wrong else 0


def _axes() -> Any:
    for folder in reversed(FOLDERS):
        sys.path.insert(0, str(ROOT / folder))
    try:
        import layout_axes
    finally:
        for folder in FOLDERS:
            sys.path.remove(str(ROOT / folder))
    return layout_axes


def _kept(old: str) -> Iterator[tuple[str, str]]:
    """Outcomes that the page has, by row."""
    for line in old.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].isdigit():
            yield " | ".join(cells[:3]), " | ".join(cells[3:])


def _told(files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Outcomes of a run, by row."""
    axes = _axes()
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            row = dict(zip(axes.AXES, found["row"], strict=True))
            outcome = "; ".join(found["problems"]) or EQUAL
            yield _row(row), f"{_errors(found['fp32'])} | {_errors(found['narrow'])} | {outcome}"


def _errors(found: list[float] | None) -> str:
    return "-" if found is None else f"{found[0]:.0e}, {found[1]:.0e}"


def _intro() -> list[str]:
    axes = _axes()
    models, attentions = (
        "; ".join(f"{name} with {_plain(args)}" for name, args in table.items() if args)
        for table in (axes.MODELS, axes.ATTENTIONS)
    )
    return [
        f"{len(axes.layouts().rows)} layouts of up to {axes.MOST_RANKS} ranks, in which every pair of values of the "
        f"{len(axes.AXES)} settings that `phalanx.spec` accepts together stands together in some row. "
        f"Models: {models}. Attention: {attentions}.",
        "",
        "| ranks | layout | beside it | fp32 | in 16 bits | outcome |",
        "|---:|---|---|---|---|---|",
    ]


def _plain(args: Mapping[str, Any]) -> str:
    flat: dict[str, Any] = {}
    for key, value in args.items():
        if key == "rope_scaling":
            flat[key] = value["type"]
        elif value:
            flat |= value if isinstance(value, Mapping) else {key: value}
    return ", ".join(_said(key, value) for key, value in flat.items())


def _rows(told: Mapping[str, str]) -> Iterator[str]:
    axes = _axes()
    for row in sorted(axes.layouts().rows, key=axes.world_size_of):
        yield f"| {_row(row)} | {told.get(_row(row), NOT_RUN)} |"


def _row(choice: Mapping[str, Any]) -> str:
    axes = _axes()
    sizes = " x ".join(f"{axis} {choice[axis]}" for axis in SIZES if choice[axis] != 1) or "one rank"
    said = axes.said_of(choice)
    placed = ["schedule", "stages_per_rank", "stage_split", "uneven_stages", "zero", "ep", "cp_comm_type"]
    layout = ", ".join([sizes, *(_said(axis, said[axis]) for axis in placed if axis in said)])
    beside = (_said(axis, value) for axis, value in said.items() if axis not in (*SIZES, *placed))
    return f"{axes.world_size_of(choice)} | {layout} | {', '.join(beside) or '-'}"


def _said(axis: str, value: Any) -> str:
    name = SAID.get(axis, axis)
    return name if isinstance(value, bool) else f"{name} {value}".strip()


def _refused() -> Iterator[str]:
    """Each reason once, with the values and pairs that it keeps out."""
    found = _axes().layouts()
    reasons: dict[str, list[str]] = {}
    for (axis, value), refusal in found.refused_values.items():
        reasons.setdefault(refusal.reason, []).append(_named(axis, value))
    for (one, other), refusal in found.refused_pairs.items():
        reasons.setdefault(refusal.reason, []).append(f"{_named(*one)} with {_named(*other)}")
    yield from ("", "In no row, and why:", "", "| settings | `phalanx.spec` says |", "|---|---|")
    for reason, kept_out in sorted(reasons.items()):
        yield f"| {'; '.join(kept_out)} | {reason.replace('|', chr(92) + '|')} |"


def _named(axis: str, value: Any) -> str:
    return f"`{axis}` {'left out' if value is None else str(value).lower() if isinstance(value, bool) else value}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
