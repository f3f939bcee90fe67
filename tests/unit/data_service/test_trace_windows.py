"""From steps to documents and back: inverse of each other, with mixtures, journals, forks and attempts."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from split_kit import texts_of, tokenizer_bytes, write_dataset

from phalanx.core.errors import PhalanxError
from phalanx.data.tracing import MOST_EPOCHS, MOST_TOKENS, Steps, TracedSource, Tracer
from phalanx.lineage import ForkPoint
from phalanx.objects import open_store
from phalanx.stream import Order, ShardIndices, open_split
from phalanx.stream.mixture import Change, Mixture
from phalanx.stream.view import View

BATCH, SEQ_LEN = 4, 32


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two splits with one tokenizer and other documents."""
    texts = texts_of(1, 45), texts_of(2, 30)
    tokenizer = tokenizer_bytes([*texts[0], *texts[1]])
    made = []
    for name, each in zip(("code", "prose"), texts, strict=True):
        ids = [f"{name}/{number % 40}" for number in range(len(each))]
        store = open_store(write_dataset(tmp_path_factory.mktemp(name) / "d", each, tokenizer, ids=ids))
        split = open_split(store)
        order = Order(split, 7, SEQ_LEN, 2, ShardIndices(store, split))
        made.append(TracedSource(name, store, split, order))
    return made


def mixed(start=0, first=(0, 0)):
    later = Change(start + 40, (Fraction(1, 3), Fraction(2, 3)), 4000)
    return Mixture([Change(start, (Fraction(3, 4), Fraction(1, 4)), 4000), later], start=start, first=first)


def tracer(sources, view=None, steps=None, **options):
    chosen = sources if view is not None and view.mixture.num_sources == 2 else sources[:1]
    return Tracer(chosen, steps or Steps(BATCH), view, **options)


@pytest.mark.parametrize("mixture", [None, mixed()], ids=["one", "two"])
@settings(max_examples=12, deadline=None)
@given(step=st.integers(1, 40))
def test_trace_document_leads_back_to_the_step(sources, mixture, step):
    traced = tracer(sources, View(mixture))
    for segment in traced.step(step):
        visits = [
            visit
            for visit in traced.document(segment.document_id, 8)
            if (visit.shard, visit.document, visit.source) == (segment.shard, segment.document, segment.source)
        ]
        assert [visit.epoch for visit in visits] == list(range(8))
        (seen,) = [visit for visit in visits if segment.window in visit.windows]
        assert step in seen.steps


@pytest.mark.parametrize("mixture", [None, mixed()], ids=["one", "two"])
@settings(max_examples=12, deadline=None)
@given(number=st.integers(0, 39), epoch=st.integers(0, 2))
def test_trace_steps_of_a_document_hold_all_its_tokens_and_no_other_step_does(sources, mixture, number, epoch):
    traced = tracer(sources, View(mixture))
    for visit in traced.document(f"code/{number}", epoch + 1):
        if visit.epoch != epoch:
            continue
        found = [
            (segment.offset, segment.length, segment.window)
            for step in visit.steps
            for segment in traced.step(step)
            if (segment.shard, segment.document, segment.source) == (visit.shard, visit.document, "code")
            and segment.window in visit.windows
        ]
        source = sources[0]
        shard = [source.split.shard(k).name for k in range(source.split.num_shards)].index(visit.shard)
        length = int(source.order.index_of(shard).lengths[visit.document])
        assert sorted({window for _, _, window in found}) == list(visit.windows)
        # A window may hold the document's end in one epoch and its beginning in the next.
        assert sum(size for _, size, _ in found) >= length


def test_trace_each_step_of_an_epoch_holds_its_batch_of_tokens_once(sources):
    traced = tracer(sources, View(mixed()))
    for step in range(1, 30):
        windows = [segment.window for segment in traced.step(step)]
        assert sorted(set(windows)) == list(range((step - 1) * BATCH, step * BATCH))
        assert sum(segment.length for segment in traced.step(step)) == BATCH * SEQ_LEN


def test_trace_windows_that_the_journal_takes_out_have_no_weight(sources):
    traced = tracer(sources, View(zero_weight=[(5, 7)]))
    weights = {segment.window: segment.weight for segment in traced.step(2)}
    assert weights == {4: 1, 5: 0, 6: 0, 7: 1}
    taken = next(segment for segment in traced.step(2) if segment.window == 5)
    visit = next(each for each in traced.document(taken.document_id, 1) if 5 in each.windows)
    assert 5 in visit.left_out and set(visit.left_out) <= {5, 6}


def test_trace_lost_windows_of_a_source_have_no_weight(sources):
    view = View(mixed(), lost={1: [(0, 2)]})
    traced = tracer(sources, view)
    segments = [segment for step in range(1, 5) for segment in traced.step(step)]
    lost = sorted({segment.window for segment in segments if not segment.weight})
    assert len(lost) == 2 and {segment.source for segment in segments if segment.window in lost} == {"prose"}


def test_trace_fork_with_another_batch_counts_from_where_its_origin_stood(sources):
    origin = ForkPoint("default", "parent", 2, 10, 40)
    steps = Steps(6, origin)
    traced = tracer(sources, steps=steps)
    assert {segment.window for segment in traced.step(11)} == set(range(40, 46))
    assert {segment.window for segment in traced.step(12)} == set(range(46, 52))
    with pytest.raises(PhalanxError, match="the steps up to 10 are those of job parent"):
        next(traced.step(10))
    for segment in traced.step(12):
        visits = traced.document(segment.document_id, 6)
        assert any(12 in visit.steps for visit in visits if segment.window in visit.windows)
    told = list(traced.document("code/1", 3))
    assert all(window >= 40 for visit in told for window in visit.windows)
    assert all(step > 10 for visit in told for step in visit.steps)


@given(st.integers(1, 9), st.integers(0, 50), st.integers(0, 500), st.integers(1, 300))
def test_steps_and_windows_are_inverse(batch, origin_step, position, ahead):
    for steps in (Steps(batch), Steps(batch, ForkPoint("p", "j", 1, origin_step, position))):
        first = 0 if steps.origin is None else origin_step
        windows = steps.windows(first + ahead)
        assert len(windows) == batch and {steps.step_of(window) for window in windows} == {first + ahead}
        assert steps.windows(first + 1).start == steps.first_window


def test_trace_step_behind_the_end_of_the_data_is_refused(sources):
    from phalanx.stream.mixture import Limit

    change = Change(0, (Fraction(1), Fraction(1)), 4000)
    mixture = Mixture([change], limits=[Limit(6, stops=True), Limit()])
    with pytest.raises(PhalanxError, match="the sources have run out before it"):
        next(tracer(sources, View(mixture)).step(9))


@pytest.mark.parametrize("mixture", [None, mixed()], ids=["one", "two"])
def test_trace_goes_as_far_as_its_bound_and_no_further(sources, mixture):
    most = MOST_TOKENS // SEQ_LEN // BATCH
    traced = tracer(sources, View(mixture), Steps(BATCH, last=9))
    found = list(traced.step(most))
    assert {segment.window for segment in found} == set(range((most - 1) * BATCH, most * BATCH))
    assert sum(segment.length for segment in found) == BATCH * SEQ_LEN
    for step in (most + 1, 9 * 10**18, 10**20):
        with pytest.raises(PhalanxError, match=rf"--step is {step}: expected {most:,} or less.*ends at step 9;"):
            next(traced.step(step))
    for question in (traced.document, lambda text, epochs: traced.text(text, epochs, 1)):
        with pytest.raises(PhalanxError, match=r"--epochs is 10001: expected 10,000 passes"):
            question("code/1", MOST_EPOCHS + 1)


def test_trace_fork_goes_as_far_as_its_bound_too():
    origin = ForkPoint("default", "parent", 1, 10, 120)
    steps = Steps(BATCH, origin)
    most = 10 + (MOST_TOKENS // SEQ_LEN - 120) // BATCH
    assert steps.windows(most, SEQ_LEN).stop * SEQ_LEN <= MOST_TOKENS
    with pytest.raises(PhalanxError, match=f"expected {most:,} or less"):
        steps.windows(most + 1, SEQ_LEN)


def test_trace_tells_how_far_it_is(sources):
    heard = []
    traced = tracer(sources, told=lambda *row: heard.append(row))
    list(traced.document("code/1", 3))
    shards = sources[0].split.num_shards
    assert heard == [("shards", k + 1, shards) for k in range(shards)] + [("passes", k + 1, 3) for k in range(3)]
    heard.clear()
    shown = tracer(sources, View(mixed()), shows=True, told=lambda *row: heard.append(row))
    shown.text("no", 1, limit=10**30)
    assert heard[-1] == ("passes", 1, 1)
    for source in sources:
        number = source.split.num_shards
        assert [row for row in heard if row[0] == f"shards of {source.name}"][-1][1:] == (number, number)


def test_trace_text_gives_visits_counts_and_what_they_say(sources):
    traced = tracer(sources, View(mixed()), shows=True)
    found = traced.text("no2x7 ", 2, limit=20)
    assert (found.documents, found.occurrences, found.is_all) == (1, 1, True)
    assert [(visit.epoch, visit.source, visit.document_id) for visit in found.visits] == [
        (0, "prose", "prose/7"),
        (1, "prose", "prose/7"),
    ]
    assert found.visits[0].text.startswith("no2x7 ") and found.visits[0].steps
    many = traced.text("no", 1, limit=3)
    assert many.documents == 3 and not many.is_all and len(many.visits) == 3
    with pytest.raises(PhalanxError, match="--text"):
        traced.text("no9x9", 1, limit=3)


def test_trace_shows_what_each_segment_says(sources):
    segments = list(tracer(sources, shows=True).step(3))
    assert all(segment.text is not None for segment in segments)
    starting = [segment for segment in segments if segment.starts_document and segment.length > 12]
    assert starting and all(segment.text.startswith("no1x") for segment in starting)
