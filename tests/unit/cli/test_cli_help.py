"""The command line answers at once: no command's help loads what is heavy."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "transformers", "webdataset", "boto3", "tokenizers")
COMMANDS = (
    [],
    ["run"],
    ["init"],
    ["demo"],
    ["doctor"],
    ["plan"],
    ["config", "check"],
    ["data", "prepare"],
    ["checkpoint", "export"],
    ["checkpoint", "import"],
    ["checkpoint", "diff"],
    ["checkpoint", "verify"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_any_command_loads_nothing_heavy(command):
    probe = (
        "import sys\nfrom phalanx.cli.main import main\n"
        f"sys.argv = ['phalanx', *{command!r}, '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip().endswith("LOADED []"), done.stdout[-300:]


MOST_TIMES = 2.5
LIBRARY = """
import sys, typer
app = typer.Typer()
for name in ("a", "b"):
    app.command(name)(lambda number: None)
sys.argv = ["it", "--help"]
app()
"""
HELP = "import sys; sys.argv = ['phalanx', '--help']; from phalanx.cli.main import main; main()"


def test_help_takes_few_times_the_processor_time_of_an_empty_command_line():
    """0.55 s against 0.33 s at load 8. In turns, as neighbours on a core make the same work take twice as
    long by the processor's clock: so a figure of its own would be one of the machine.
    """
    times = [(cpu_s(HELP), cpu_s(LIBRARY)) for _ in range(5)]
    help_s, library_s = (min(each) for each in zip(*times, strict=True))
    assert help_s < MOST_TIMES * library_s, times


def cpu_s(program: str) -> float:
    """Processor time of a process, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
