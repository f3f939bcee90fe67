"""Messages as the JSON that the page reads: numbers as numbers, what is not finite as null, enums without their prefix,
times in ISO 8601, bytes in base64. A field that is absent is left out; one that merely has its default is there.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any, cast

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from phalanx.api.agent.v1 import record_pb2  # noqa: F401 - so that enums of its messages are known


def plain(message: Message) -> Any:
    """The message as plain JSON values."""
    if isinstance(message, Timestamp):
        return message.ToJsonString()
    return {
        field.name: _field(message, field)
        for field in cast(Sequence[FieldDescriptor], message.DESCRIPTOR.fields)
        if not field.has_presence or message.HasField(field.name)
    }


def _field(message: Message, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {str(key): _scalar(value[key], field.message_type.fields_by_name["value"]) for key in value}
    if field.is_repeated:
        return _column(value, field)
    return _scalar(value, field)


def _column(values: Iterable[Any], field: FieldDescriptor) -> list[Any]:
    """Long columns of numbers are the bulk of a run: no call for each of them where none is needed."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_INT64:
        return list(values)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return [value if math.isfinite(value) else None for value in values]
    return [_scalar(value, field) for value in values]


def _scalar(value: Any, field: FieldDescriptor) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if field.enum_type is not None:
        return _enum(value, field.enum_type)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _enum(number: int, kind: EnumDescriptor) -> str:
    """JOB_STATE_RUNNING of JobState as `running`; a number that this version does not know as itself."""
    value = kind.values_by_number.get(number)
    if value is None:
        return str(number)
    unspecified = kind.values_by_number[0].name
    return value.name.removeprefix(unspecified.removesuffix("UNSPECIFIED")).lower()
