"""python -m benchmarks.planner predict | score | fit: the planner against published measurements.

The measurements are not part of Phalanx: give a file by --rows, or a folder with public.json and ranking_public.json by
the environment variable PHALANX_TRUTH.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.core.files import write_output

from .fit import Linear
from .predict import predict
from .report import markdown, scatter, update
from .score import score, score_ranking
from .truth import load_rows, scored

INTERRUPTED = 130
ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 2 for bad input, with one line that says what is wrong."""
    options = _parser().parse_args(arguments)
    folder = os.environ.get("PHALANX_TRUTH")
    rows = options.rows or (Path(folder) / "public.json" if folder and options.command != "predict" else None)
    if rows is None:
        print("skipped: no measurements; give --rows FILE or set PHALANX_TRUTH to their folder")
        return 0
    try:
        return int({"predict": _predict, "score": _score, "fit": _fit}[options.command](options, rows))
    except PhalanxError as wrong:
        print(f"{wrong}", file=sys.stderr)
        return 2
    except OSError as wrong:
        print(f"{wrong.filename or 'standard output'}: {wrong.strerror}; name another file", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.planner", description="The planner against measurements.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (
        ("predict", "answer each row of a file, without its answers"),
        ("score", "errors by tier, GPU and source, cross-validated, into docs/planner.md"),
        ("fit", "fit the numbers of the time model and print them"),
    ):
        command = commands.add_parser(name, help=words)
        command.add_argument("--rows", type=Path, help='a JSON file {"rows": [...]}', required=name == "predict")
        if name == "predict":
            command.add_argument("--out", type=Path, required=True, help="where the answers go")
        if name == "score":
            command.add_argument("--ranking", type=Path, help="a JSON file of sets of rivals")
            command.add_argument("--page", type=Path, default=ROOT / "docs" / "planner.md")
            command.add_argument("--picture", type=Path, default=ROOT / "docs" / "pictures" / "planner-scatter.svg")
    return parser


def _predict(options: argparse.Namespace, rows: Path) -> int:
    given = load_rows(rows)
    if options.out.exists() and options.out.samefile(rows):
        raise PhalanxError("--out", value=str(options.out), expected="another file than --rows", remedy="name another")
    answers = predict(given)
    try:
        write_output(options.out, json.dumps({"rows": answers}, indent=1).encode() + b"\n")
    except OSError as cause:
        why = f"{cause.strerror}; name another"
        raise PhalanxError(
            "--out", value=str(options.out), expected="a file that can be written", remedy=why
        ) from cause
    failed = sum("error" in answer for answer in answers)
    print(f"{len(answers)} rows, {failed} of them cannot be answered (their `error` says why): {options.out}")
    return 0


def _score(options: argparse.Namespace, path: Path) -> int:
    rows = load_rows(path)
    found = score(rows)
    beside = options.ranking or path.with_name("ranking_public.json")
    sets = json.loads(beside.read_text()) if beside.exists() else []
    ranking = score_ranking(sets, rows)
    picture = os.path.relpath(options.picture, options.page.parent)
    write_output(options.picture, scatter(found).encode())
    update(options.page, markdown(found, ranking, picture))
    for lines in found.lines().values():
        for line in lines:
            errors = f"by source {line.by_source:6.1%}  by family {line.by_family:6.1%}  shipped {line.shipped:6.1%}"
            print(f"{line.name:40} {line.rows:4} rows  {errors}")
    print(f"memory {found.memory}; ranking {ranking}")
    return 0


def _fit(options: argparse.Namespace, path: Path) -> int:
    fitted = Linear(scored(load_rows(path))).fit()
    print(fitted.calibration)
    for key, factor in fitted.speeds.items():
        print(f"    {key}: {factor:.3f},")
    return 0


if __name__ == "__main__":
    sys.exit(main())
