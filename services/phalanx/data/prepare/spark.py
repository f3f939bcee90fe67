"""Spark makes the chunks: one task a piece, each by the same code as every other engine.

Chunks go from the executors straight to the store; only figures come back. Executors need this package installed, and
reach the input and `out` by the same paths, URLs and credentials as the driver. What a task refuses or finds broken
comes back as data, so that it is told as it is everywhere else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phalanx.core.digest import sha256
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.prepare.board import Board
from phalanx.data.prepare.chunk import find_chunks
from phalanx.data.prepare.making import TOKENIZER_KEY, Task, WorkOrder, piece_names
from phalanx.data.prepare.progress import Figures
from phalanx.objects import ObjectStore

if TYPE_CHECKING:
    from pyspark import SparkContext

_POLL_S = 0.5
_TRIES = 2
_PYTHON = "PYSPARK_PYTHON"
_MASTER = re.compile(
    r"local(\[(\*|[1-9]\d*)(,[1-9]\d*)?\])?|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]|yarn"
    r"|spark://[^\s:,/]+:\d+(,[^\s:,/]+:\d+)*|k8s://\S+"
)
_PYTHON_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt): ")


class Spark:
    """master: a Spark master URL, or None for what Spark's own settings say, else all local cores.

    A session that is active already is used, and stays. Raises PhalanxError for a master that Spark knows no form of.
    """

    def __init__(self, master: str | None = None) -> None:
        if master is not None and not _MASTER.fullmatch(master):
            raise PhalanxError(
                "--spark-master",
                value=master,
                expected="local, local[8], local[*], spark://host:7077, k8s://host:port or yarn",
                remedy="write one of these forms",
            )
        self._master = master

    def make(self, order: WorkOrder, out: ObjectStore, tasks: Sequence[Task], board: Board) -> None:
        """See Engine. A job that fails, as when an executor dies, is run once more for what is missing."""
        if out.url.startswith("memory://"):
            raise PhalanxError(
                "--out", value=out.url, expected="file:// or s3:// with --engine spark", remedy="change it"
            )
        with _context(self._master) as context:
            for left in range(_TRIES - 1, -1, -1):
                cause = _run(context, order, [task for task in tasks if board.is_needed(task.number)], board)
                if cause is None:
                    return
                if not left:
                    raise OutsideError(f"the Spark job failed twice: {_first_line(cause)}") from cause
                digest = sha256(out.read(TOKENIZER_KEY))
                found = find_chunks(out, piece_names(((task.number, task.piece) for task in tasks), digest))
                left_over = [task for task in tasks if task.number not in found.finished]
                tasks = [Task(task.number, task.piece, found.parts.get(task.number, ())) for task in left_over]


def make_one(order: str, task: str) -> str:
    """One task, in an executor: what came of it, as JSON."""
    try:
        made = Task.from_json(task)
        figures = WorkOrder.from_json(order).maker().make(made)
        return json.dumps({"number": made.number, "figures": asdict(figures)})
    except PhalanxError as error:
        shown = error.value if isinstance(error.value, int | float | None) else str(error.value)
        return json.dumps({"refused": [error.where, shown, error.expected, error.remedy]})
    except OutsideError as error:
        return json.dumps({"outside": str(error)})


def _run(context: SparkContext, order: WorkOrder, tasks: Sequence[Task], board: Board) -> Exception | None:
    """Runs one job; what made it fail, or None. Raises what its tasks refuse or find broken."""
    if not tasks:
        return None
    answers = context.accumulator([], _joining())
    lines, order_json = [task.to_json() for task in tasks], order.to_json()
    failures: list[Exception] = []

    def run() -> None:
        try:
            context.parallelize(lines, len(lines)).foreach(lambda line: answers.add([make_one(order_json, line)]))
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits, which raises it
            failures.append(error)

    thread = threading.Thread(target=run, name="phalanx-spark", daemon=True)
    thread.start()
    taken: set[int] = set()  # a task that Spark repeats answers twice
    try:
        is_over = False
        while not is_over:
            thread.join(_POLL_S)
            is_over = not thread.is_alive()
            for answer in map(json.loads, list(answers.value)):
                _take(answer, board, taken)
            board.show()
    except BaseException:
        context.cancelAllJobs()
        raise
    return failures[0] if failures else None


def _take(answer: dict[str, Any], board: Board, taken: set[int]) -> None:
    if "refused" in answer:
        where, value, expected, remedy = answer["refused"]
        raise PhalanxError(where, value=value, expected=expected, remedy=remedy)
    if "outside" in answer:
        raise OutsideError(answer["outside"])
    if answer["number"] not in taken:
        taken.add(answer["number"])
        board.finished(answer["number"], Figures(**answer["figures"]))


@contextmanager
def _context(master: str | None) -> Iterator[SparkContext]:
    """A Spark context, stopped at the end unless it was there before. Raises PhalanxError where Spark cannot run."""
    try:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise PhalanxError(
            "--engine spark", expected="pyspark to be installed", remedy="pip install 'phalanx[spark]'"
        ) from error
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active.sparkContext
        return
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        raise PhalanxError(
            "--engine spark", expected="Java 17 or later", remedy="install it, or set JAVA_HOME to where it is"
        )
    builder = SparkSession.builder.appName("phalanx data prepare")
    settings = {
        "spark.ui.showConsoleProgress": "false",
        "spark.executorEnv.TOKENIZERS_PARALLELISM": "false",  # a task has one core
        "spark.executorEnv.OMP_NUM_THREADS": "1",
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    if master is not None:
        builder = builder.master(master)
    if (master or "").startswith("local"):  # a machine's own name may lead nowhere
        builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    given = os.environ.get(_PYTHON)
    os.environ.setdefault(_PYTHON, sys.executable)  # executors on this machine run this very Python
    try:
        session = builder.getOrCreate()
    except (PySparkException, Py4JError) as error:
        where = "" if master is None else f" with --spark-master {master}"
        raise OutsideError(f"Spark does not start{where}: {_first_line(error)}") from error
    finally:
        if given is None:
            del os.environ[_PYTHON]
    try:
        yield session.sparkContext
    finally:
        session.stop()


def _joining() -> Any:
    """How lists of answers add up."""
    from pyspark.accumulators import AccumulatorParam

    class Joining(AccumulatorParam[list[str]]):
        def zero(self, value: list[str]) -> list[str]:
            return []

        def addInPlace(self, value1: list[str], value2: list[str]) -> list[str]:  # noqa: N802 - Spark's name
            value1 += value2
            return value1

    return Joining()


def _first_line(error: Exception) -> str:
    """What Python in an executor said, else the first line of what Java said (py4j writes it behind a colon)."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    java = (line.removeprefix(": ") for line in lines if line.startswith(": "))
    return next((line.strip() for line in lines if _PYTHON_ERROR.match(line)), next(java, lines[0]))
