"""`python requirements.py PYPROJECT EXTRA...`: what the package and these extras need, one requirement a line."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path


def required(project: dict[str, object], names: list[str]) -> Iterator[str]:
    """The requirements of `names`, with references from one extra to others (`phalanx[rpc]`) resolved."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    for name in names:
        for requirement in extras[name]:
            if own := re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", requirement):
                yield from required(project, own[1].split(","))
            else:
                yield requirement


def main() -> None:
    """Writes them to standard output, sorted."""
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    found = {*project["dependencies"], *required(project, sys.argv[2:])}
    sys.stdout.write("".join(f"{line}\n" for line in sorted(found)))


if __name__ == "__main__":
    main()
