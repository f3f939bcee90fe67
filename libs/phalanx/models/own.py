"""What a job names of the user's own: imported and called, or refused in one line. Free of torch."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from phalanx.core.errors import PhalanxError, shortened


def own_object(key: str, path: str) -> Any:
    """What `path` (`package.module:name`, the value of `key`) names. Raises PhalanxError where there is no such thing,
    or its module fails as it is imported.
    """
    module_name, _, name = path.partition(":")
    try:
        with _folder_kept():
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise _not_there(key, path, error) from error
    except (Exception, SystemExit) as error:
        raise _fails(error, key, path, "a module that can be imported") from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise _not_there(key, path, error) from error


def _not_there(key: str, path: str, error: Exception) -> PhalanxError:
    return PhalanxError(
        key,
        value=path,
        expected=f"an importable package.module:{'Class' if key.endswith('class') else 'function'}",
        remedy=f"install it, put it on PYTHONPATH or into code.path ({told(error)})",
    )


@contextmanager
def calling_own(where: str, expected: str, value: object = None) -> Iterator[None]:
    """Around a call of what is the user's own: whatever it raises becomes a PhalanxError with the line that raised.

    where: the key or the method. expected: what it should have done. value: what `where` is, if that helps.
    """
    try:
        with _folder_kept():
            yield
    except PhalanxError:
        raise
    except (Exception, SystemExit) as error:
        raise _fails(error, where, value, expected) from error


@contextmanager
def _folder_kept() -> Iterator[None]:
    """Relative paths of the job file mean the same after code that calls os.chdir()."""
    fd = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        yield
    finally:
        os.fchdir(fd)
        os.close(fd)


def _fails(error: BaseException, where: str, value: object, expected: str) -> PhalanxError:
    return PhalanxError(where, value=value, expected=expected, remedy=f"correct it: {told(error)}")


def told(error: BaseException) -> str:
    """An exception in one line: its type, the first line of its text, and the last line of the user's own that it came
    through, if any.
    """
    text = next(iter(str(error).splitlines()), "")
    own = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_own(frame)]
    place = f" ({own[-1][0]}:{own[-1][1]})" if own else ""
    return type(error).__name__ + (f": {shortened(text)}" if text else "") + place


def _is_own(frame: FrameType) -> bool:
    top = str(frame.f_globals.get("__name__")).partition(".")[0]
    return top not in ("phalanx", "torch") and top not in sys.stdlib_module_names


def own_function(key: str, path: str) -> Any:
    """As `own_object`, for what is called."""
    found = own_object(key, path)
    if not callable(found):
        raise PhalanxError(key, value=path, expected="a function", remedy=f"name one, not a {type(found).__name__}")
    return found
