"""torch.compile where blocks become C++, as they do on a CPU: half a file of a killed process is never taken for whole.

inductor lets the compiler write libraries and precompiled headers under their last names, into a cache that outlives
the process and is shared by all of a user's, and takes whatever lies there: half a file would break every later
attempt on that machine. So the compiler is called by a script, which has it write beside the name and renames.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from phalanx.core.files import write_atomically

# inductor holds a lock of the output while it compiles, so what lies beside it is nobody's any more.
_SCRIPT = """#!/bin/sh
# Calls the C++ compiler so that its output is under its name only once it is whole.
out= before=
for word in "$@"; do
    if [ "$before" = -o ]; then out=$word; fi
    before=$word
done
if [ -z "$out" ]; then exec {compiler} "$@"; fi
rm -f "$out".*.part
part=$out.$$.part before= left=$#
while [ "$left" -gt 0 ]; do
    word=$1
    shift
    if [ "$before" = -o ]; then set -- "$@" "$part"; else set -- "$@" "$word"; fi
    before=$word left=$((left - 1))
done
{compiler} "$@" && mv -f "$part" "$out"
code=$?
rm -f "$part"
exit $code
"""


def write_whole_files() -> None:
    """From here on inductor's compiler, where it is a g++, writes each file whole or not at all. Raises OSError where
    inductor's cache takes no file.
    """
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    script = Path(cache_dir()) / "phalanx-g++"
    first, compiler = config.cpp.cxx
    if compiler == str(script) or not re.search(r"(^|/)[^/]*(?<!clan)g\+\+[^/]*$", compiler):
        return
    write_atomically(script, compiler_script(compiler).encode(), 0o755)
    config.cpp.cxx = (first, str(script))


def compiler_script(compiler: str) -> str:
    """Of a C++ compiler that takes `-o FILE`."""
    return _SCRIPT.format(compiler=shlex.quote(compiler))
