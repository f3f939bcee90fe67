"""Runs import-linter over the package as a wheel would install it.

In the working tree the package has two roots, libs/ and services/, of which import-linter sees one; here both are laid
together in a temporary folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """The exit code of import-linter."""
    with tempfile.TemporaryDirectory() as folder:
        for source in ("libs", "services"):
            shutil.copytree(ROOT / source / "phalanx", Path(folder) / "phalanx", dirs_exist_ok=True)
        command = [str(Path(sys.executable).with_name("lint-imports")), str(ROOT / "pyproject.toml")]
        paths = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
        return subprocess.run([*command, "--no-cache"], cwd=folder, env={**os.environ, "PYTHONPATH": paths}).returncode


if __name__ == "__main__":
    sys.exit(main())
