"""The hand-off: what a device makes of packed windows is their int64 form, for both stored types."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.stream.packed import PackedWindows
from phalanx.trainer.widen import to_device

CPU = torch.device("cpu")


@st.composite
def packed_windows(draw):
    rows, seq_len = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    dtype = draw(st.sampled_from([np.uint16, np.uint32]))
    tokens = draw(
        st.lists(st.integers(0, np.iinfo(dtype).max), min_size=rows * (seq_len + 1), max_size=rows * (seq_len + 1))
    )
    places = st.sets(st.integers(0, rows * seq_len - 1))
    starts = sorted(draw(places) | {row * seq_len for row in range(rows)})
    counts = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    return PackedWindows(
        np.array(tokens, dtype).reshape(rows, seq_len + 1),
        np.array(starts, np.int64),
        np.array(sorted(draw(places)), np.int64),
        np.array(counts, bool),
    )


@settings(max_examples=150, deadline=None)
@given(windows=packed_windows(), has_documents=st.booleans())
def test_to_device_of_any_windows_equals_their_int64_form(windows, has_documents):
    batch = to_device(windows, 1, CPU, has_documents=has_documents)
    assert batch.tokens.tolist() == windows.inputs().tolist()
    assert batch.targets.tolist() == windows.targets().tolist()
    assert batch.position_ids.tolist() == windows.position_ids().tolist()
    assert all(tensor.dtype == torch.int64 for tensor in (batch.tokens, batch.targets, batch.position_ids))
    if has_documents:
        assert batch.document_ids.tolist() == windows.document_ids().tolist()
    else:
        assert batch.document_ids is None


@settings(max_examples=60, deadline=None)
@given(windows=packed_windows(), data=st.data())
def test_split_of_any_windows_gives_the_rows_of_the_whole(windows, data):
    rows = windows.shape[0]
    edges = np.array([0, *sorted(data.draw(st.lists(st.integers(0, rows), max_size=3))), rows])
    parts = windows.split(edges)
    for name in ("inputs", "targets", "position_ids", "document_ids"):
        joined = np.concatenate([getattr(part, name)() for part in parts])
        assert (joined == getattr(windows, name)()).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_to_device_of_a_gpu_equals_the_cpu():
    windows = PackedWindows(
        np.array([[65535, 1, 40000, 7], [9, 8, 7, 6]], np.uint16),
        np.array([0, 2, 3], np.int64),
        np.array([1], np.int64),
        np.array([True, False]),
    )
    here, there = to_device(windows, 1, CPU), to_device(windows, 1, torch.device("cuda"))
    for name in ("tokens", "targets", "position_ids", "document_ids"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu())
