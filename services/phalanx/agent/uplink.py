"""The stream to train: hello, heartbeats, reports until they are acknowledged, answers; orders come down.

A stream that breaks is opened again for ever, with growing pauses; meanwhile reports wait and gangs go on. A report is
sent again on every new stream until train acknowledges its number; an answer is sent once, for train asks again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from phalanx.agent.node import Item
from phalanx.agent.outbox import Numbered, Outbox, Waiting
from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1.agent_service_pb2_grpc import AgentServiceStub
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.rpc.client import Channel
from phalanx.rpc.retry import pause_s

LONGEST_PAUSE_S = 3.0
REFUSED_PAUSE_S = 10.0
BATCH_S, SLOW_BATCH_S = 0.1, 1.0  # the slow one while train acknowledges little: the end of a gang may wait for long
MANY_UNACKNOWLEDGED = 64
LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Session:
    """One stream, as its sender sees it. resend: reports of earlier streams that come first. said_end: whether it was
    said here that the agent ends.
    """

    resend: deque[Numbered[Item]]
    answers: deque[pb.Answer] = field(default_factory=deque)
    is_over: bool = False
    said_end: bool = False


class Uplink:
    """Keeps the stream open and what must reach train. Everything public is safe from any thread.

    hello: made anew for each stream. on_order, on_acknowledged: called in this uplink's thread; they return at once.
    """

    def __init__(
        self,
        channel: Channel,
        hello: Callable[[], pb.Hello],
        on_order: Callable[[pb.Order], None],
        on_acknowledged: Callable[[Numbered[Item]], None],
        *,
        heartbeat_s: float,
        max_waiting: int,
    ) -> None:
        self._stub, self._hello = AgentServiceStub(channel), hello
        self._on_order, self._on_acknowledged = on_order, on_acknowledged
        self._heartbeat_s = heartbeat_s
        self._outbox: Outbox[Item] = Outbox(max_waiting)
        self._changed = threading.Condition()
        self._session: _Session | None = None
        self._is_ending = False
        self._stopped = threading.Event()
        self._end_stream: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="uplink", daemon=True)

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def put(self, waiting: Waiting[Item]) -> None:
        """Takes what must reach train."""
        with self._changed:
            self._outbox.put(waiting)
            self._changed.notify_all()

    def answer(self, answer: pb.Answer) -> None:
        """Sends an answer, where a stream is open."""
        with self._changed:
            if self._session is not None:
                self._session.answers.append(answer)
                self._changed.notify_all()

    def say_end(self) -> None:
        """Tells train, before anything that is told from now on, that nothing begins here any more."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    @property
    def is_connected(self) -> bool:
        """Whether train has welcomed this agent on the stream that is open."""
        return self._session is not None

    @property
    def num_dropped(self) -> int:
        """Progress records that were dropped so far."""
        return self._outbox.num_dropped

    def flush(self, deadline_s: float) -> bool:
        """Whether all that was told is acknowledged, at the latest after `deadline_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._outbox.is_empty, deadline_s)

    def close(self) -> None:
        """Ends the stream, and opens no other."""
        self._stopped.set()
        self._end_stream()
        self._thread.join(10.0)

    def _run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            began_s = time.monotonic()
            try:
                self._serve()
                problem: Exception | None = None
            except (OutsideError, PhalanxError) as error:
                problem = error
            if self._stopped.is_set():
                return
            number = 0 if time.monotonic() - began_s > LONGEST_PAUSE_S else number + 1
            pause = REFUSED_PAUSE_S if isinstance(problem, PhalanxError) else pause_s(number, longest_s=LONGEST_PAUSE_S)
            log = LOG.warning if number <= 1 or isinstance(problem, PhalanxError) else LOG.debug
            log("the stream to train ended: %s; the gangs go on", problem or "train closed it")
            self._stopped.wait(pause)

    def _serve(self) -> None:
        """One stream, from its hello to its end."""
        with self._changed:
            session = _Session(deque(self._outbox.unacknowledged))
        stream = self._stub.Connect(self._requests(session))
        self._end_stream = stream.cancel
        stream.add_callback(lambda: self._over(session))
        try:
            if self._stopped.is_set():
                return
            for response in stream:
                self._take(session, response)
        finally:
            self._over(session)
            stream.cancel()

    def _over(self, session: _Session) -> None:
        with self._changed:
            session.is_over = True
            if self._session is session:
                self._session = None
            self._changed.notify_all()

    def _take(self, session: _Session, response: pb.ConnectResponse) -> None:
        match response.WhichOneof("message"):
            case "welcome":
                LOG.info("connected to train")
                with self._changed:
                    if not session.is_over:
                        self._session = session
                    self._changed.notify_all()
            case "acknowledgement":
                with self._changed:
                    freed: Iterable[Numbered[Item]] = self._outbox.acknowledge(response.acknowledgement.number)
                    self._changed.notify_all()
                for report in freed:
                    self._on_acknowledged(report)
            case "order":
                self._on_order(response.order)
            case _:
                LOG.warning("train says something that this version does not know")

    def _requests(self, session: _Session) -> Iterator[pb.ConnectRequest]:
        yield pb.ConnectRequest(hello=self._hello())
        heartbeat_at_s = time.monotonic() + self._heartbeat_s
        report_at_s = 0.0
        while not session.is_over:
            now_s = time.monotonic()
            if now_s >= heartbeat_at_s:
                heartbeat_at_s = now_s + self._heartbeat_s
                yield self._heartbeat()
            with self._changed:
                is_due = now_s >= report_at_s
                request = self._next(session, may_report=is_due)
                if request is None:
                    waits = heartbeat_at_s if is_due or not self._outbox.has_waiting else report_at_s
                    self._changed.wait(max(0.0, min(heartbeat_at_s, waits) - now_s))
                    continue
                if request.WhichOneof("message") == "report":
                    is_slow = self._outbox.num_unacknowledged > MANY_UNACKNOWLEDGED
                    report_at_s = now_s + (SLOW_BATCH_S if is_slow else BATCH_S)
            yield request

    def _heartbeat(self) -> pb.ConnectRequest:
        told = pb.Heartbeat(num_dropped_records=self._outbox.num_dropped, is_ending=self._is_ending)
        return pb.ConnectRequest(heartbeat=told)

    def _next(self, session: _Session, *, may_report: bool) -> pb.ConnectRequest | None:
        """What is to be sent now: nothing but the hello before train's welcome."""
        if self._session is not session:
            return None
        if self._is_ending and not session.said_end:
            session.said_end = True
            return self._heartbeat()
        if session.answers:
            return pb.ConnectRequest(answer=session.answers.popleft())
        if session.resend:
            return _request(session.resend.popleft())
        report = self._outbox.next_report() if may_report else None
        return None if report is None else _request(report)


def _request(report: Numbered[Item]) -> pb.ConnectRequest:
    told = pb.Report(number=report.number, job=report.job, attempt=report.attempt)
    for item in report.items:
        if isinstance(item, pb.GangEnded):
            told.gang_ended.CopyFrom(item)
        else:
            told.records.records.append(item)
    return pb.ConnectRequest(report=told)
