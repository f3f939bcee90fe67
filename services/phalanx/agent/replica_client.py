"""Sends a share to the partner node."""

from __future__ import annotations

from phalanx.agent.replica_wire import Wire, context_of, head_fields, opened
from phalanx.agent.replicas import Held
from phalanx.core.errors import OutsideError
from phalanx.rpc.config import Credentials, split_address


def push(address: str, credentials: Credentials, token: str, held: Held, deadline_s: float) -> None:
    """Returns once the share lies whole in the memory of the agent at `address` (host:port). token: of the attempt.
    Raises OutsideError where it does not within `deadline_s`; nothing of it counts there then.
    """
    context = context_of(credentials, is_server=False)
    with opened(split_address(address, "address of the partner"), context, deadline_s) as connection:
        wire = Wire(connection, deadline_s)
        wire.require_agent()
        wire.say({"token": token, "deadline_s": deadline_s, **head_fields(held.head)})
        for each in held.head.objects:
            with held.view(each) as view:
                wire.send(view)
        answer = wire.hear()
    if "error" in answer:
        raise OutsideError(f"the partner node at {address} refuses a share: {answer['error']}")
