"""Errors as gRPC status and back: `google.rpc.Status` with one `ErrorInfo` for each mistake, in the trailing metadata.

An ErrorInfo's reason is the class; its metadata are what, value (JSON), expected and remedy. Texts are cut so that the
status stays within the metadata that gRPC carries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc
from google.rpc.error_details_pb2 import ErrorInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from phalanx.core.errors import OutsideError, PhalanxError, Problems
from phalanx.rpc import errors

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "phalanx"
MAX_TEXT_CHARACTERS, MAX_STATUS_BYTES = 2_000, 24 * 2**10

_CODES: dict[type[PhalanxError], grpc.StatusCode] = {
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Superseded: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Denied: grpc.StatusCode.PERMISSION_DENIED,
    PhalanxError: grpc.StatusCode.INVALID_ARGUMENT,
}
_CLASSES = {kind.__name__: kind for kind in _CODES}
_RAW_SIZE = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")


@dataclass(frozen=True, slots=True)
class WireStatus:
    """A gRPC status as sent: code, a one-line message, and the serialized google.rpc.Status."""

    code: grpc.StatusCode
    message: str
    details: bytes


@dataclass(frozen=True, slots=True)
class Called:
    """What was called, for the words of an error: the service's short name, its address, the method."""

    service: str
    endpoint: str
    method: str

    def __str__(self) -> str:
        return f"service {self.service} at {self.endpoint}"


def code_of(error: PhalanxError) -> grpc.StatusCode:
    """The status code of the nearest class in the error's ancestry."""
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)


def wire_status(error: PhalanxError | OutsideError) -> WireStatus:
    """How a handler's error travels."""
    if isinstance(error, OutsideError):
        infos = [ErrorInfo(reason=type(error).__name__, domain=DOMAIN, metadata={"what": _cut(str(error))})]
        return _wire(grpc.StatusCode.UNAVAILABLE, str(error), infos)
    mistakes: Iterable[PhalanxError] = error.problems if isinstance(error, Problems) else (error,)
    infos = [_info(each) for each in mistakes]
    if isinstance(error, Problems):
        infos.insert(0, ErrorInfo(reason="Problems", domain=DOMAIN, metadata={"what": _cut(error.where)}))
    return _wire(code_of(error), str(error), infos)


def internal_status(error_id: str) -> WireStatus:
    """How an unexpected exception travels: without its text, with the number under which the log tells it."""
    info = ErrorInfo(reason="Internal", domain=DOMAIN, metadata={"id": error_id})
    return _wire(grpc.StatusCode.INTERNAL, f"unexpected error {error_id}; the service's log tells it", [info])


def _wire(code: grpc.StatusCode, text: str, infos: Sequence[ErrorInfo]) -> WireStatus:
    message = _cut(text.replace("\n", "; "))
    status = Status(code=code.value[0], message=message)
    for number, info in enumerate(infos):
        status.details.add().Pack(info)
        if status.ByteSize() > MAX_STATUS_BYTES and number:
            del status.details[-1]
            break
    return WireStatus(code, message, status.SerializeToString())


def _info(error: PhalanxError) -> ErrorInfo:
    reason = next(kind.__name__ for kind in type(error).__mro__ if kind in _CODES)
    fields = {
        "what": _cut(error.where),
        "expected": _cut(error.expected),
        "remedy": _cut(error.remedy),
        "type": type(error).__name__,
    }
    if error.value is not None:
        fields["value"] = _value(error.value)
    return ErrorInfo(reason=reason, domain=DOMAIN, metadata=fields)


def _value(value: object) -> str:
    plain = value if isinstance(value, bool | int | float | str | list | dict) else str(value)
    try:
        text = json.dumps(plain)
    except (TypeError, ValueError):
        text = json.dumps(str(value))
    return text if len(text) <= MAX_TEXT_CHARACTERS else json.dumps(_cut(str(value)))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARACTERS else text[: MAX_TEXT_CHARACTERS - 3] + "..."


def raised(called: Called, error: grpc.Call, deadline_s: float | None = None) -> PhalanxError | OutsideError:
    """The error that a failed call means to its caller."""
    code, text = error.code(), error.details() or ""
    infos = _infos(error)
    if code == grpc.StatusCode.UNAVAILABLE:
        return errors.Unavailable(_outside(called, infos) or f"{called} went away or cannot be reached: {text}")
    if code == grpc.StatusCode.INTERNAL:
        return OutsideError(f"{called} failed in {called.method}: {text}")
    if infos:
        return _mistake(infos)
    return _without_details(called, code, text, deadline_s)


def _without_details(
    called: Called, code: grpc.StatusCode, text: str, deadline_s: float | None
) -> PhalanxError | OutsideError:
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        allowed = "the deadline" if deadline_s is None else f"{deadline_s:g} s"
        return errors.TimedOut(f"{called} did not answer {called.method} within {allowed}")
    if code == grpc.StatusCode.CANCELLED:
        return errors.Unavailable(f"{called} ended the call of {called.method}")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return PhalanxError(
            f"method {called.method}",
            expected=f"one that {called} knows",
            remedy="run client and services from the same version of Phalanx",
        )
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        size = _RAW_SIZE.search(text)
        return (
            too_large(called.method, int(size[1]), int(size[2]))
            if size
            else errors.Unavailable(f"{called} has too many calls at once")
        )
    return OutsideError(f"{called} failed in {called.method}: {code.name}: {text}")


def too_large(method: str, num_bytes: int, limit_bytes: int) -> errors.Exhausted:
    """A message above the limit, on whichever side it is noticed."""
    return errors.Exhausted(
        f"message of {method}",
        value=f"{num_bytes / 2**20:.1f} MiB",
        expected=f"at most {limit_bytes / 2**20:g} MiB",
        remedy="ask for less at a time; bulk data belongs in storage",
    )


def has_details(call: grpc.Call) -> bool:
    """Whether the status came from a server of ours, not from gRPC itself."""
    return bool(_infos(call))


def _infos(error: grpc.Call) -> list[ErrorInfo]:
    """The ErrorInfos that came with the status; none from a server that is not ours."""
    raw = [value for key, value in error.trailing_metadata() or () if key == DETAILS_KEY]
    infos: list[ErrorInfo] = []
    for each in Status.FromString(raw[0]).details if raw and isinstance(raw[0], bytes) else ():
        info = ErrorInfo()
        if each.Unpack(info) and info.domain == DOMAIN:
            infos.append(info)
    return infos


def _outside(called: Called, infos: Sequence[ErrorInfo]) -> str:
    return f"{called}: {infos[0].metadata['what']}" if infos else ""


def _mistake(infos: Sequence[ErrorInfo]) -> PhalanxError:
    if infos[0].reason == "Problems":
        return Problems(infos[0].metadata["what"], map(_one_mistake, infos[1:]))
    return _one_mistake(infos[0])


def _one_mistake(info: ErrorInfo) -> PhalanxError:
    fields = info.metadata
    value = json.loads(fields["value"]) if "value" in fields else None
    kind = _CLASSES.get(info.reason, PhalanxError)
    return kind(fields["what"], value=value, expected=fields["expected"], remedy=fields["remedy"])
