"""Arrays cut into parts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.stream.parts import parts, parts_of_places, slices


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6), data=st.data())
def test_parts_hold_what_lies_between_edges_counted_from_each_edge(sizes, data):
    edges = np.cumsum([0, *sizes])
    places = np.sort(np.array(data.draw(st.lists(st.integers(0, max(0, int(edges[-1]) - 1)), max_size=12)), np.int64))
    places = places[places < edges[-1]]
    begins = edges[:-1].tolist()
    found = [
        places[(begin <= places) & (places < begin + size)] - begin for begin, size in zip(begins, sizes, strict=True)
    ]
    assert [part.tolist() for part in parts_of_places(places, edges)] == [part.tolist() for part in found]
    whole = np.arange(int(edges[-1]))
    assert np.concatenate(parts(whole, slices(edges))).tolist() == whole.tolist()
    assert [len(part) for part in parts(whole, slices(edges))] == sizes
