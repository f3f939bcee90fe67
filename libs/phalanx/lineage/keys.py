"""Every key below a job's root, in one place: numbers are zero-padded to 8 digits, so that keys sort as numbers do."""

from __future__ import annotations

import re

from phalanx.core.numbering import LARGEST, MOST_DIGITS
from phalanx.lineage.values import CheckpointRef, RecordsName

JOB = "job.json"
ATTEMPTS = "attempts/"
JOURNAL = "journal/"
LEASES = "leases/"
CODE = "code/"

_ATTEMPT = re.compile(r"attempts/([0-9]{8})\.json")
_ENTRY = re.compile(r"journal/a([0-9]{8})/([0-9]{8})\.json")
_CHECKPOINT = re.compile(r"a([0-9]{8})/s([0-9]{8})/.+")
_MANIFEST = re.compile(r"a([0-9]{8})/s([0-9]{8})/manifest\.json")
_WRITER = re.compile(r"a([0-9]{8})/s([0-9]{8})/(?:objects/([0-9]{8})-[0-9]{8}\.safetensors|parts/([0-9]{8})\.json)")
_RETIRED = re.compile(r"a([0-9]{8})/s([0-9]{8})/retired\.json")
_LEASE = re.compile(r"leases/a([0-9]{8})/s([0-9]{8})/([a-z]+-[0-9a-f]{32})/([0-9]{8})\.json")
_RECORDS = re.compile(r"a([0-9]{8})/records/s([0-9]{8})-s([0-9]{8})-r([0-9]{8})\.safetensors")


def number(value: int) -> str:
    """`value` as it stands in keys: 8 digits. Raises ValueError outside 0 .. 99,999,999, where keys would no longer
    sort.
    """
    if not 0 <= value <= LARGEST:
        raise ValueError(f"{value} does not fit a key's {MOST_DIGITS} digits")
    return f"{value:0{MOST_DIGITS}d}"


def code(digest: str) -> str:
    """`code/<digits>.tar`: packed code of the user's own, named by its own digest."""
    return f"{CODE}{digest.rpartition(':')[2]}.tar"


def attempt(attempt: int) -> str:
    """`attempts/<A>.json`: the attempt object, which is also the fence against every older attempt."""
    return f"{ATTEMPTS}{number(attempt)}.json"


def attempt_number(key: str) -> int | None:
    """The number of the attempt whose object `key` is, or None for any other key."""
    match = _ATTEMPT.fullmatch(key)
    return int(match[1]) if match else None


def journal(attempt: int) -> str:
    """Prefix of the journal entries that `attempt` wrote."""
    return f"{JOURNAL}a{number(attempt)}/"


def journal_entry(attempt: int, entry: int) -> str:
    """`journal/a<A>/<n>.json`; entries of an attempt count from 1."""
    return f"{journal(attempt)}{number(entry)}.json"


def journal_entry_number(key: str) -> int | None:
    """The number of the journal entry at `key`, or None for any other key."""
    match = _ENTRY.fullmatch(key)
    return int(match[2]) if match else None


def records_of(attempt: int) -> str:
    """Prefix of the step records that `attempt` wrote."""
    return f"a{number(attempt)}/records/"


def records(name: RecordsName) -> str:
    """`a<A>/records/s<first>-s<last>-r<rank>.safetensors`; both steps are included."""
    steps = f"s{number(name.first_step)}-s{number(name.last_step)}"
    return f"{records_of(name.attempt)}{steps}-r{number(name.rank)}.safetensors"


def records_name(key: str) -> RecordsName | None:
    """What the key of a records object says about it, or None for any other key."""
    match = _RECORDS.fullmatch(key)
    return RecordsName(*(int(part) for part in (match[1], match[4], match[2], match[3]))) if match else None


def record_list(attempt: int, digest: str) -> str:
    """`a<A>/records/lists/<digits>.json`: names of step records. It lies beside them, as it is kept for as long as
    they are; named by its own digest, so that it has one content.
    """
    return f"{records_of(attempt)}lists/{digest.rpartition(':')[2]}.json"


def checkpoints_of(attempt: int) -> str:
    """Prefix of everything that belongs to a checkpoint of `attempt`."""
    return f"a{number(attempt)}/s"


def checkpoint(ref: CheckpointRef) -> str:
    """Prefix of everything that belongs to one checkpoint."""
    return f"{checkpoints_of(ref.attempt)}{number(ref.step)}/"


def checkpoint_of(key: str) -> CheckpointRef | None:
    """The checkpoint below whose prefix `key` lies, or None."""
    match = _CHECKPOINT.fullmatch(key)
    return CheckpointRef(int(match[1]), int(match[2])) if match else None


def manifest(ref: CheckpointRef) -> str:
    """`a<A>/s<step>/manifest.json`: its existence is the checkpoint's existence."""
    return f"{checkpoint(ref)}manifest.json"


def manifest_ref(key: str) -> CheckpointRef | None:
    """The checkpoint whose manifest `key` is, or None for any other key."""
    match = _MANIFEST.fullmatch(key)
    return CheckpointRef(int(match[1]), int(match[2])) if match else None


def retired(ref: CheckpointRef) -> str:
    """`a<A>/s<step>/retired.json`: what the manifest of a checkpoint said that retention removed."""
    return f"{checkpoint(ref)}retired.json"


def retired_ref(key: str) -> CheckpointRef | None:
    """The checkpoint whose retired manifest `key` is, or None for any other key."""
    match = _RETIRED.fullmatch(key)
    return CheckpointRef(int(match[1]), int(match[2])) if match else None


def promoted(ref: CheckpointRef) -> str:
    """`a<A>/s<step>/promoted.json`: the speculative checkpoint was found healthy."""
    return f"{checkpoint(ref)}promoted.json"


def parts(ref: CheckpointRef) -> str:
    """Prefix of the part objects of one checkpoint."""
    return f"{checkpoint(ref)}parts/"


def part(ref: CheckpointRef, rank: int) -> str:
    """`a<A>/s<step>/parts/<rank>.json`: what one rank wrote for the checkpoint."""
    return f"{parts(ref)}{number(rank)}.json"


def part_list(ref: CheckpointRef, digest: str) -> str:
    """`a<A>/s<step>/lists/<digits>.json`: names of parts of one checkpoint; it is named by its own digest."""
    return f"{checkpoint(ref)}lists/{digest.rpartition(':')[2]}.json"


def directory(ref: CheckpointRef, digest: str) -> str:
    """`a<A>/s<step>/directory/<digits>.json`: where the boxes of tensors are found; it is named by its own digest."""
    return f"{checkpoint(ref)}directory/{digest.rpartition(':')[2]}.json"


def objects(ref: CheckpointRef) -> str:
    """Prefix of the tensor data of one checkpoint."""
    return f"{checkpoint(ref)}objects/"


def tensors(ref: CheckpointRef, writer: str, index: int) -> str:
    """`a<A>/s<step>/objects/<rank>-<n>.safetensors`: tensor data; `writer` is the rank, padded."""
    return f"{objects(ref)}{writer}-{number(index)}.safetensors"


def writer(key: str) -> tuple[CheckpointRef, int] | None:
    """The checkpoint, and the rank whose tensors or part the key names; None for any other key."""
    match = _WRITER.fullmatch(key)
    return (CheckpointRef(int(match[1]), int(match[2])), int(match[3] or match[4])) if match else None


def leases_of(ref: CheckpointRef) -> str:
    """Prefix of the leases on one checkpoint."""
    return f"{LEASES}{checkpoint(ref)}"


def lease(ref: CheckpointRef, name: str, number_: int) -> str:
    """`leases/a<A>/s<step>/<purpose>-<id>/<n>.json`: the n-th sign of life of whoever works with a checkpoint."""
    return f"{leases_of(ref)}{name}/{number(number_)}.json"


def lease_parts(key: str) -> tuple[CheckpointRef, str, int] | None:
    """The checkpoint, the lease's name and the number that the key of a lease says, or None for any other key."""
    match = _LEASE.fullmatch(key)
    return (CheckpointRef(int(match[1]), int(match[2])), match[3], int(match[4])) if match else None
