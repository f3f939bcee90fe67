"""The figures of the wire: sizes, deadlines, capacity, and how soon a dead peer is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_MESSAGE_BYTES = 32 * 2**20
MAX_METADATA_BYTES = 64 * 2**10
CALL_DEADLINE_S, STREAM_DEADLINE_S = 10.0, 3600.0
PING_EVERY_S, PING_ANSWER_S = 10.0, 5.0
LONGEST_RECONNECT_S = 3.0

Options = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server serves at once. A call holds a thread while it runs, made when first needed.

    max_streams: server, client and bidirectional streams; one more is refused with RESOURCE_EXHAUSTED. max_calls:
    threads beside those of the streams, so that full streams never stop a unary call. max_waiting: calls that wait
    for a thread; one more is refused.
    """

    max_streams: int = 4096
    max_calls: int = 32
    max_waiting: int = 1024
    max_message_bytes: int = MAX_MESSAGE_BYTES


def server_options(limits: Limits) -> Options:
    """gRPC's settings of a server. What it may receive is twice our limit, so that our own check can say so clearly."""
    return (
        ("grpc.so_reuseport", 0),
        *_sizes(2 * limits.max_message_bytes),
        *_pings(),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(PING_EVERY_S * 500)),
        ("grpc.http2.min_ping_interval_without_data_ms", int(PING_EVERY_S * 500)),
    )


def channel_options(max_message_bytes: int) -> Options:
    """gRPC's settings of a channel. Retries are ours; proxies of the environment are for the world outside."""
    return (
        *_sizes(2 * max_message_bytes),
        *_pings(),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", int(PING_ANSWER_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(LONGEST_RECONNECT_S * 1000)),
    )


def _sizes(max_message_bytes: int) -> Options:
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
    )


def _pings() -> Options:
    return (
        ("grpc.keepalive_time_ms", int(PING_EVERY_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(PING_ANSWER_S * 1000)),
        ("grpc.http2.ping_timeout_ms", int(PING_ANSWER_S * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
    )
