"""A reading plan as the contract of the data service tells it, and back: for the service, its clients and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phalanx.api.data.v1 import data_service_pb2 as pb
from phalanx.lineage.plan import MixtureChange, ReadingPlan, Spans


def plan_message(plan: ReadingPlan) -> pb.ReadingPlan:
    """As a message."""
    return pb.ReadingPlan(
        horizon_step=plan.horizon_step,
        zero_weight=span_messages(plan.zero_weight),
        journal_digest=plan.journal_digest,
        mixture=[
            pb.MixtureChange(position=each.position, weights=weight_messages(dict(each.weights)))
            for each in plan.mixture
        ],
        lost=[pb.LostWindows(source=source, windows=span_messages(spans)) for source, spans in plan.lost],
    )


def plan_of(message: pb.ReadingPlan) -> ReadingPlan:
    """From a message."""
    return ReadingPlan(
        message.horizon_step,
        spans_of(message.zero_weight),
        message.journal_digest,
        tuple(
            MixtureChange(change.position, tuple((each.source, each.weight) for each in change.weights))
            for change in message.mixture
        ),
        tuple((each.source, spans_of(each.windows)) for each in message.lost),
    )


def weight_messages(weights: Mapping[str, str]) -> list[pb.SourceWeight]:
    """Weights by source, by name."""
    return [pb.SourceWeight(source=name, weight=text) for name, text in sorted(weights.items())]


def span_messages(spans: Spans) -> list[pb.Span]:
    """Half-open ranges of windows."""
    return [pb.Span(start=start, stop=stop) for start, stop in spans]


def spans_of(messages: Iterable[pb.Span]) -> Spans:
    """From messages."""
    return tuple((span.start, span.stop) for span in messages)
