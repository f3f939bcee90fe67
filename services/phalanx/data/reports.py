"""Takes reports of damaged shards: reads the shard itself, decides by the job's policy, writes the journal, answers.

Killed before the journal entry is there, nothing happened; killed after it, the same report gets the same entry. Two
who report at once get one decision: reports of one job wait for each other, and an entry is named by what it decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import xxhash

from phalanx.core.digest import xxh3
from phalanx.core.errors import PhalanxError
from phalanx.data.damage import (
    Finding,
    allowed_shards,
    covering,
    damage_of,
    damages_in,
    decide,
    lost_windows,
    payload_of,
    reach_of,
    request_id_of,
    shards_left_out,
)
from phalanx.data.decisions import Action, Damage
from phalanx.data.jobs import FoundJob, JobSource, Journals, require_job
from phalanx.data.plans import require_newest
from phalanx.lineage import position_after
from phalanx.lineage.plan import DAMAGE_KIND
from phalanx.lineage.registry import JobName
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.rpc.errors import NotFound
from phalanx.stream.manifest import ShardEntry, Split, index_key, tar_key
from phalanx.trainer.mixing import JobReading

CHUNK_BYTES = 8 << 20
MAX_WHY = 500
_NUM_LOCKS = 64


class Reports:
    """Decisions about damage for every registered job. count: told of each decision."""

    def __init__(self, jobs: JobSource, journals: Journals, count: Callable[[Action], None]) -> None:
        self._jobs, self._journals, self._count = jobs, journals, count
        self._locks = tuple(threading.Lock() for _ in range(_NUM_LOCKS))

    def damages(self, name: JobName) -> tuple[Damage, ...]:
        """What was decided for a job, in any of its attempts, oldest first; raises NotFound."""
        return damages_in(require_job(self._jobs, name).lineage.all_journal_entries())

    def report(self, name: JobName, attempt: int, shard: str, why: str, step: int) -> Damage:
        """The decision about the object `shard` (its key below the training split), which `attempt` met in `step`.

        Raises NotFound, Superseded, PhalanxError; OutsideError where storage fails, so that nothing can be decided yet.
        """
        found = require_job(self._jobs, name)
        if step < 1:
            raise PhalanxError("step", value=step, expected="1 or more", remedy="steps are counted from 1")
        with self._locks[hash(name) % _NUM_LOCKS]:
            damage = self._decide(found, attempt, shard, " ".join(why.split())[:MAX_WHY], step)
        self._count(damage.action)
        return damage

    def _decide(self, found: FoundJob, attempt: int, shard: str, why: str, step: int) -> Damage:
        view = self._journals.view(found)
        require_newest(str(found.name), view.newest, attempt)
        job = self._jobs.current(found)
        batch = job.training.global_batch_size
        own = next(each for each in found.lineage.attempts() if each.number == attempt)
        record = found.lineage.read_job()
        origin = record.origin if record is not None else None
        reading = JobReading.of(job, origin)
        number, name, key = located(reading, shard)
        source, mixture = reading.sources[number], reading.mixture(view.plan.mixture)
        local, order = shard_number(source.split, key), source.order
        position = position_after(step - 1, batch, origin)
        # Windows of the source's own stream; of a single split they are the positions.
        start, reported, end = (
            mixture.counts(position_after(done, batch, origin))[number]
            for done in (own.start_step, step - 1, job.training.steps)
        )
        for entry in covering(order, view.entries, shard, start, reported, end):
            return damage_of(entry)
        finding = look_at(source.store, source.split, local, key, why)
        if finding is None:
            return Damage(shard, why, Action.RETRY, (), attempt, 0, name)
        prefix = f"{name}/" if name else ""
        objects = tuple(f"{prefix}{each}" for each in finding.objects)
        finding = replace(finding, shard=shard, objects=objects, number=source.first_shard + local)
        reach = reach_of(order, start, reported, end)
        lost = lost_windows(order, finding, reach, source.first_shard)
        action = decide(job.recovery.on_bad_shard, lost, reported, end)
        left_out = shards_left_out(view.entries) | {finding.number}
        num_shards = sum(each.split.num_shards for each in reading.sources)
        allowed = allowed_shards(num_shards, job.recovery.bad_shard_budget)
        if action is Action.SKIP and len(left_out) > allowed:
            action = Action.STOP
            spent = f"{len(left_out)} damaged shards of {num_shards}, recovery.bad_shard_budget allows {allowed}"
            finding = replace(finding, why=f"{finding.why}; {spent}")
        if lost and action is Action.SKIP and not name:
            position = lost[0][0]
        entry = found.lineage.append_journal(
            attempt,
            DAMAGE_KIND,
            position,
            payload_of(finding, action, reach, lost, name),
            request_id=request_id_of(finding, action, reach),
        )
        return damage_of(entry)


def located(reading: JobReading, shard: str) -> tuple[int, str, str]:
    """The source of a reported object by number and, in a mixture, by name ("" in a job of one split), and the object's
    key below the split. Raises NotFound.
    """
    if not reading.job.data.is_mixture:
        return 0, "", shard
    name, _, key = shard.partition("/")
    for number, source in enumerate(reading.sources):
        if source.name == name:
            return number, name, key
    raise NotFound(
        "shard",
        value=shard[:200],
        expected=f"SOURCE/KEY with one of the job's sources ({', '.join(each.name for each in reading.sources)})",
        remedy="report the key that could not be read",
    )


def shard_number(split: Split, key: str) -> int:
    """The number of the shard whose tar or index `key` is; raises NotFound."""
    for key_of in (tar_key, index_key):
        number = split.number_of(key.removesuffix(key_of("")))
        if number is not None and key == key_of(split.columns.names[number]):
            return number
    raise NotFound(
        "shard",
        value=key[:200],
        expected=f"the key of a shard's tar or index in {split.url}",
        remedy="report the key that could not be read",
    )


def look_at(store: ObjectStore, split: Split, number: int, shard: str, why: str) -> Finding | None:
    """What is wrong with a shard, read whole; None where it is what the manifest says. What is wrong only once is not
    damage. Raises what the store raises.
    """
    entry = split.shard(number)
    problems = {key: problem for key, problem in _problems(store, entry) if problem}
    if not problems:
        return None
    told = "; ".join(f"{key} {problem}" for key, problem in problems.items())
    return Finding(
        shard=shard,
        number=number,
        digest=entry.digest,
        objects=tuple(problems),
        is_index_lost=index_key(entry.name) in problems,
        why=f"{told} (reader: {why})" if why else told,
    )


def _problems(store: ObjectStore, entry: ShardEntry) -> list[tuple[str, str]]:
    tar, index = tar_key(entry.name), index_key(entry.name)
    return [
        (tar, _tar_problem(store, tar, entry) and _tar_problem(store, tar, entry)),
        (index, _index_problem(store, index, entry) and _index_problem(store, index, entry)),
    ]


def _tar_problem(store: ObjectStore, key: str, entry: ShardEntry) -> str:
    """What is wrong with a tar, "" for nothing; read in chunks."""
    try:
        num_bytes = store.info(key).num_bytes
        if num_bytes != entry.num_bytes:
            return f"has {num_bytes} bytes instead of {entry.num_bytes}"
        digest = xxhash.xxh3_128()
        for offset in range(0, num_bytes, CHUNK_BYTES):
            digest.update(store.read(key, offset, min(CHUNK_BYTES, num_bytes - offset)))
    except ObjectMissing:
        return "is missing"
    return "" if f"xxh3:{digest.hexdigest()}" == entry.digest else f"does not have the digest {entry.digest}"


def _index_problem(store: ObjectStore, key: str, entry: ShardEntry) -> str:
    try:
        data = store.read(key)
    except ObjectMissing:
        return "is missing"
    return "" if xxh3(data) == entry.index_digest else f"does not have the digest {entry.index_digest}"
