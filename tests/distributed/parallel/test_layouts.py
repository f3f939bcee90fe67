"""The numerics contract over generated layouts of up to 8 ranks, in which every pair of settings that `phalanx.spec`
accepts together stands together: five steps of each beside one fp32 process.

A layout that computes or sums in 16 bits is trained twice: so, and in fp32, where the bounds are tight.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from five_steps import write_reference
from layout_axes import AXES, in_fp32, is_narrow, layouts, world_size_of
from support.covering import Choice
from test_parity import BF16_GRADIENT_BOUND, BF16_LOSS_BOUND, FP32_BOUND

from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import run_gang

pytestmark = pytest.mark.distributed

# Names a file that gets one line of JSON a layout: what the page of layouts is written from.
OUTCOMES = "PHALANX_LAYOUT_OUTCOMES"
ROWS_A_GANG = 3


def _sample(rows: Iterable[Choice]) -> list[int]:
    """Numbers of the few rows in which every value of every axis stands, of many equals those of the fewest ranks. One
    whose blocks are compiled, which takes minutes, is taken last and is the only one.
    """
    left, chosen = dict(enumerate(rows)), []
    missing = {single for row in left.values() for single in row.items()}

    def wanted(number: int) -> tuple[bool, int, int, int]:
        brought = len(missing & left[number].items())
        return brought > 0 and not left[number]["compile"], brought, -world_size_of(left[number]), -number

    while missing:
        best = max(left, key=wanted)
        missing -= left.pop(best).items()
        chosen.append(best)
    return sorted(chosen)


def _gangs(numbers: Iterable[int], rows_a_gang: int = ROWS_A_GANG) -> list[Any]:
    """World size and numbers of the rows that one gang trains, so few that it ends in time on a busy machine: one where
    blocks are compiled first.
    """
    by_kind: dict[tuple[int, bool], list[int]] = {}
    for number in numbers:
        row = layouts().rows[number]
        by_kind.setdefault((world_size_of(row), bool(row["compile"])), []).append(number)
    return [
        pytest.param(size, own[first : first + most], id=f"{size}-{own[first]}")
        for (size, is_compiled), own in sorted(by_kind.items())
        for most in (1 if is_compiled else rows_a_gang,)
        for first in range(0, len(own), most)
    ]


SAMPLE = _sample(layouts().rows)
REST = [number for number in range(len(layouts().rows)) if number not in SAMPLE]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world_size", "numbers"), _gangs(SAMPLE))
def test_five_steps_of_a_sample_of_layouts_are_those_of_one_process(
    fork_server: ForkServer, tmp_path: Path, world_size: int, numbers: list[int]
) -> None:
    _check(fork_server, tmp_path, world_size, numbers)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world_size", "numbers"), _gangs(REST))
def test_five_steps_of_every_further_layout_are_those_of_one_process(
    fork_server: ForkServer, tmp_path: Path, world_size: int, numbers: list[int]
) -> None:
    _check(fork_server, tmp_path, world_size, numbers)


def _check(fork_server: ForkServer, folder: Path, world_size: int, numbers: list[int]) -> None:
    rows = {str(number): layouts().rows[number] for number in numbers}
    references = {name: str(folder / f"{name}.safetensors") for name in rows}
    for name, row in rows.items():
        write_reference(row, references[name])
    choices = {name: in_fp32(row) for name, row in rows.items()}
    choices |= {f"{name} narrow": row for name, row in rows.items() if is_narrow(row)}
    references |= {name: references[name.split()[0]] for name in choices}
    arguments = {"choices": choices, "references": references}
    found = run_gang(fork_server, world_size, "five_steps:run_choices", arguments, timeout_s=280)[0]
    assert found.keys() == choices.keys()
    problems = {name: list(_problems(is_narrow(choices[name]), measured)) for name, measured in found.items()}
    for name, row in rows.items():
        narrow = f"{name} narrow"
        _tell(int(name), row, found[name], found.get(narrow), problems[name] + problems.get(narrow, []))
    assert not any(problems.values()), "\n".join(f"{n}: {p}" for n, told in problems.items() for p in told)


def _problems(narrow: bool, measured: Mapping[str, Any]) -> Iterable[str]:
    """Where five steps are not those of one process.

    In 16 bits weights are equal at first only, and so gradients are compared in the first step; where a token chose
    another expert in it, whose gradients then differ, all gradients as one vector.
    """
    loss_bound, bound = (BF16_LOSS_BOUND, BF16_GRADIENT_BOUND) if narrow else (FP32_BOUND, FP32_BOUND)
    if not measured["weights_equal"]:
        yield "initial weights differ"
    if any(measured["moved"]) and not narrow:
        yield f"tokens of the experts differ: {measured['moved']}"
    for step, (loss, norm) in enumerate(zip(measured["losses"], measured["norms"], strict=True)):
        if not loss <= loss_bound:
            yield f"loss of step {step} off by {loss:.1e}"
        if not norm <= bound:
            yield f"gradient norm of step {step} off by {norm:.1e}"
    compared = 1 if narrow else len(measured["losses"])
    for step, whole in enumerate(measured["whole"][:compared]):
        if not whole <= bound:
            yield f"gradients of step {step} off by {whole:.1e}"
    if narrow and any(measured["moved"][:1]):
        return
    for step, (error, name) in enumerate(measured["worst"][:compared]):
        if not error <= bound:
            yield f"gradient of {name} in step {step} off by {error:.1e}"


def _tell(
    number: int, row: Choice, fp32: Mapping[str, Any], narrow: Mapping[str, Any] | None, problems: list[str]
) -> None:
    if (path := os.environ.get(OUTCOMES)) is None:
        return
    told = {
        "number": number,
        "row": [row[axis] for axis in AXES],
        "fp32": [max(fp32["losses"]), max(error for error, _ in fp32["worst"])],
        "narrow": None if narrow is None else [max(narrow["losses"]), narrow["whole"][0]],
        "problems": problems,
    }
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(told) + "\n")
