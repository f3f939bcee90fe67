"""Arrays cut into parts between edges; views, so nothing is copied; pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, starmap
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Scalar = TypeVar("_Scalar", bound=np.generic)


def slices(edges: NDArray[np.int64]) -> list[slice]:
    """What lies between each two of `edges`, int64 [parts + 1], sorted."""
    return list(starmap(slice, pairwise(edges.tolist())))


def parts(array: NDArray[_Scalar], between: Iterable[slice]) -> list[NDArray[_Scalar]]:
    """Rows of `array`, part by part."""
    return [array[each] for each in between]


def parts_of_places(places: NDArray[np.int64], edges: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Sorted `places` between each two of `edges`, each counted from the edge before it; all of them lie between the
    first edge and the last one.
    """
    cuts = np.searchsorted(places, edges)
    return parts(places - np.repeat(edges[:-1], np.diff(cuts)), slices(cuts))
