"""Generates libs/phalanx/api from proto/, or says whether it is fresh (`--check`).

Lint, format and breaking changes are checked by buf (`make proto`); this runs protoc with the plug-ins for Python, gRPC
and type stubs, whose versions constraints.txt pins.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "libs" / "phalanx" / "api"


def generate(out: Path) -> None:
    """Writes `phalanx/api/...` below `out`."""
    protos = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    outputs = ("python", "grpc_python", "mypy", "mypy_grpc")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *(f"--{kind}_out={out}" for kind in outputs)]
    subprocess.run(
        [*command, *protos], cwd=ROOT / "proto", env={**os.environ, "PATH": path}, check=True, stderr=subprocess.DEVNULL
    )
    for path_ in (out / "phalanx" / "api").rglob("*.py*"):  # one newline at the end, whatever a plug-in leaves
        path_.write_text(path_.read_text().rstrip("\n") + "\n")


def files_below(folder: Path) -> set[Path]:
    """Generated files, relative to `folder`."""
    return {path.relative_to(folder) for path in folder.rglob("*.py*") if "__pycache__" not in path.parts}


def main() -> int:
    """0, or 1 where `--check` finds that what is there is not what proto/ gives."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "phalanx" / "api"
        if "--check" not in sys.argv[1:]:
            shutil.rmtree(TARGET, ignore_errors=True)
            shutil.copytree(fresh, TARGET)
            return 0
        there, wanted = files_below(TARGET), files_below(fresh)
        _, different, missing = filecmp.cmpfiles(TARGET, fresh, map(str, there & wanted), shallow=False)
        stale = sorted({*different, *missing, *map(str, there ^ wanted)})
        for name in stale:
            sys.stderr.write(f"libs/phalanx/api/{name} is not what proto/ gives; run `make api`\n")
        return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
