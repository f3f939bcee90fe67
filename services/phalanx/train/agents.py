"""The streams of agents: `AgentService.Connect`. Translates; what is said goes to `launch.agents`."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator

import grpc

from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1.agent_service_pb2_grpc import AgentServiceServicer
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.rpc import Denied, Unavailable, caller, ended
from phalanx.train.launch.agents import Agents, Session

LOG = logging.getLogger(__name__)


class AgentServicer(AgentServiceServicer):
    """`phalanx.api.agent.v1.AgentService`. lost_after_s: how long an agent may be unheard."""

    def __init__(self, agents: Agents, lost_after_s: float) -> None:
        self._agents, self._lost_after_s = agents, lost_after_s

    def Connect(  # noqa: N802 - the contract's name
        self, request_iterator: Iterator[pb.ConnectRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ConnectResponse]:
        who, over = caller(context), ended(context)
        if who.job:
            raise Denied(
                "scope of the token", value=f"job {who.job}", expected="an agent's own token", remedy="use that one"
            )
        outgoing: queue.SimpleQueue[pb.ConnectResponse | Exception | None] = queue.SimpleQueue()
        session = Session(outgoing.put, lambda: outgoing.put(Unavailable("another stream of this node was opened")))
        reader = threading.Thread(
            target=self._read, args=(request_iterator, session, outgoing), name=f"agent-{who.subject}", daemon=True
        )
        context.add_callback(lambda: outgoing.put(None))
        reader.start()
        while not over.is_set():
            message = outgoing.get()
            if message is None:
                return
            if isinstance(message, Exception):
                raise message
            yield message

    def _read(
        self,
        requests: Iterator[pb.ConnectRequest],
        session: Session,
        outgoing: queue.SimpleQueue[pb.ConnectResponse | Exception | None],
    ) -> None:
        """Takes what the agent says until its stream ends, and ends the answering half with it."""
        node_id = ""
        try:
            for request in requests:
                if not node_id:
                    node_id = _hello_of(request).node_id
                    self._agents.hello(request.hello, session, self._lost_after_s)
                    LOG.info("node %s is there (agent %s)", node_id, request.hello.instance_id)
                else:
                    self._take(node_id, session, request)
        except (PhalanxError, OutsideError) as error:
            LOG.warning("the stream of node %s ends: %s", node_id or "(no name)", error)
            outgoing.put(error)
        except grpc.RpcError:
            LOG.info("the stream of node %s broke", node_id)
        except Exception as error:
            LOG.exception("the stream of node %s ends", node_id)
            outgoing.put(error)
        finally:
            if node_id:
                self._agents.gone(node_id, session)
            outgoing.put(None)

    def _take(self, node_id: str, session: Session, request: pb.ConnectRequest) -> None:
        match request.WhichOneof("message"):
            case "heartbeat":
                told = request.heartbeat
                self._agents.heard(node_id, session, told.num_dropped_records, is_ending=told.is_ending)
            case "report":
                self._agents.heard(node_id, session)
                self._agents.reported(node_id, session, request.report)
            case "answer":
                self._agents.heard(node_id, session)
                self._agents.answered(node_id, session, request.answer)
            case "hello":
                raise PhalanxError("hello", expected="one, first on a stream", remedy="open another stream")
            case _:
                LOG.warning("node %s says something that this version does not know", node_id)


def _hello_of(request: pb.ConnectRequest) -> pb.Hello:
    hello = request.hello
    if request.WhichOneof("message") != "hello" or not hello.node_id or not hello.instance_id:
        raise PhalanxError(
            "first message", expected="a hello with the names of node and instance", remedy="update the agent"
        )
    return hello
