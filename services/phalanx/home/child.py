"""`python -m phalanx.home.child PARENT_PID MODULE ARGUMENTS...`: runs a module that ends with the supervisor.

The kernel sends SIGTERM when the supervisor is gone, so that services and agent end in their own way (an agent has its
ranks commit first) and nothing is left running.
"""

from __future__ import annotations

import runpy
import signal
import sys

from phalanx.gang.linux import die_with_parent


def main() -> None:
    """Becomes the module."""
    _, parent, module, *arguments = sys.argv
    die_with_parent(int(parent), signal.SIGTERM)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
