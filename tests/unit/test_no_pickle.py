"""No code of ours unpickles or pickles anything: files and messages that Phalanx reads cannot run code (case 6).

One file does, in a process of its own that calls nothing which a pickle names (docs/decisions/importing-pickles.md).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"}
ISOLATED = "services/phalanx/checkpoint/importing/unpickle.py"
CALLS = {"torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "pandas.read_pickle"}
METHODS = {  # of torch.distributed, and of data frames
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "read_pickle",
    "to_pickle",
}


def violations(source: str) -> Iterator[str]:
    """What in a module's source pickles: imports, torch.load and save, allow_pickle, collectives of Python objects."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in MODULES:
                yield module
            yield from (f"{module}.{alias.name}" for alias in node.names if f"{module}.{alias.name}" in CALLS)
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    if name in CALLS or name.split(".")[-1] in METHODS:
        yield name
    if name in {"__import__", "importlib.import_module", "import_module"} and node.args:
        argument = node.args[0]
        if isinstance(argument, ast.Constant) and str(argument.value).split(".")[0] in MODULES:
            yield f"{name}({argument.value})"
    for keyword in node.keywords:
        if keyword.arg in {"allow_pickle", "weights_only"} and ast.unparse(keyword.value) != "False":
            yield f"{name}({keyword.arg}={ast.unparse(keyword.value)})"


def imported(source: str) -> Iterator[str]:
    """Every word of the names that a module imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (word for name in names for word in name.split("."))


def our_files() -> list[Path]:
    return [file for root in ("libs", "services") for file in sorted((ROOT / root).rglob("*.py"))]


def test_no_module_of_ours_pickles() -> None:
    files = our_files()
    assert len(files) > 30
    found = [f"{file.relative_to(ROOT)}: {what}" for file in files for what in violations(file.read_text())]
    assert found == [f"{ISOLATED}: pickle"]


def test_nothing_imports_the_program_that_unpickles() -> None:
    """Case 6: it is run in a process of its own, by its path."""
    program = ROOT / ISOLATED
    naming = [file for file in our_files() if "unpickle" in file.read_text() and file != program]
    assert [file.name for file in naming if program.name in file.read_text()] == ["isolated.py"]
    assert not [file for file in naming if "unpickle" in imported(file.read_text())]
    assert not [file for file in naming if "importing.unpickle" in file.read_text()]
    assert not {"phalanx", "torch", "numpy"} & set(imported(program.read_text()))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, _pickle as p",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import save",
        "__import__('dill')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import torch.distributed as dist\ndist.broadcast_object_list([1])",
        "import torch.distributed as dist\ndist.recv_object_list([1], src=0)",
        "frame.to_pickle('x')",
    ],
)
def test_the_guard_finds_what_it_looks_for(source: str) -> None:
    assert list(violations(source))


def test_the_guard_lets_plain_code_pass() -> None:
    source = "import json\nimport numpy as np\nnp.load('x', allow_pickle=False)\njson.load(open('x'))"
    assert not list(violations(source))
