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


def test_help_takes_less_than_half_a_second_of_cpu():
    """The least of three: a neighbour on the same core makes the same work take more of the processor's time."""
    assert min(start_and_help_cpu_s() for _ in range(3)) < 2 * 0.5


def start_and_help_cpu_s() -> float:
    """Processor time of two processes, one that loads the command line and one that shows its help, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    help_ = "import sys; sys.argv = ['phalanx', '--help']; from phalanx.cli.main import main; main()"
    for arguments in (["-m", "phalanx.cli.main"], ["-c", help_]):
        subprocess.run([sys.executable, *arguments], capture_output=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
