"""What a job names of the user's own: imported, or refused in one line. Free of torch."""

from __future__ import annotations

import importlib
import traceback
from typing import Any

from phalanx.core.errors import PhalanxError


def own_object(key: str, path: str) -> Any:
    """What `path` (`package.module:name`, the value of `key`) names. Raises PhalanxError where there is no such thing,
    or its module fails as it is imported.
    """
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise PhalanxError(
            key,
            value=path,
            expected=f"an importable package.module:{'Class' if key.endswith('class') else 'function'}",
            remedy=f"install it, put it on PYTHONPATH or into code.path ({error})",
        ) from error
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise PhalanxError(
            key,
            value=path,
            expected="a module that can be imported",
            remedy=f"correct it: {type(error).__name__}: {error} ({last.filename}:{last.lineno})",
        ) from error


def own_function(key: str, path: str) -> Any:
    """As `own_object`, for what is called."""
    found = own_object(key, path)
    if not callable(found):
        raise PhalanxError(key, value=path, expected="a function", remedy=f"name one, not a {type(found).__name__}")
    return found
