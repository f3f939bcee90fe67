"""Calls between the processes of a cluster: `serve()` and `connect()`, and who may call whom.

server.py serves, client.py calls, follow.py keeps a stream through restarts, unix.py does both on a socket; errors.py
holds the errors that keep their class on the wire, tokens.py roles and scope, pki.py certificates, config.py the files
that a process starts from, metrics.py and tracing.py what people watch. Importing the room starts no thread.
"""

from phalanx.rpc.client import Channel, connect, connect_client, connect_service
from phalanx.rpc.config import (
    ClientConfig,
    Credentials,
    Database,
    Security,
    ServiceConfig,
    find_client,
    read_client,
    read_service,
    write_config,
)
from phalanx.rpc.errors import (
    AlreadyExists,
    Denied,
    Exhausted,
    FailedPrecondition,
    NotFound,
    NotUp,
    OutOfRange,
    Superseded,
    TimedOut,
    Unauthenticated,
    Unavailable,
)
from phalanx.rpc.follow import follow
from phalanx.rpc.handlers import Access, caller, ended
from phalanx.rpc.limits import Limits
from phalanx.rpc.metrics import Metrics
from phalanx.rpc.server import Server, access_problems, serve
from phalanx.rpc.tokens import AGENTS, EVERYONE, OPERATORS, SERVICES, VIEWERS, Authority, Caller, Role, Verifier
from phalanx.rpc.unix import connect_unix, serve_unix

__all__ = [
    "AGENTS",
    "EVERYONE",
    "OPERATORS",
    "SERVICES",
    "VIEWERS",
    "Access",
    "AlreadyExists",
    "Authority",
    "Caller",
    "Channel",
    "ClientConfig",
    "Credentials",
    "Database",
    "Denied",
    "Exhausted",
    "FailedPrecondition",
    "Limits",
    "Metrics",
    "NotFound",
    "NotUp",
    "OutOfRange",
    "Role",
    "Security",
    "Server",
    "ServiceConfig",
    "Superseded",
    "TimedOut",
    "Unauthenticated",
    "Unavailable",
    "Verifier",
    "access_problems",
    "caller",
    "connect",
    "connect_client",
    "connect_service",
    "connect_unix",
    "ended",
    "find_client",
    "follow",
    "read_client",
    "read_service",
    "serve",
    "serve_unix",
    "write_config",
]
