"""Where a job is kept, from what a user names it by: a job file, or the URL of its root."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from phalanx.checkpoint.jobs import policy_of
from phalanx.checkpoint.retention import Policy
from phalanx.core.errors import PhalanxError
from phalanx.core.numbering import MOST_DIGITS, numbered
from phalanx.lineage import CheckpointRef, Lineage, keys
from phalanx.lineage.registry import JobName
from phalanx.objects import ObjectMissing, ObjectStore, open_store
from phalanx.snapshot.load import live_checkpoint
from phalanx.spec import Job, load_job, parse_job
from phalanx.trainer.places import job_store, store_at

_LIST: Final = "`phalanx checkpoint ls --all` lists what there is"


@dataclass(frozen=True, slots=True)
class JobPlace:
    """A job's store, rooted at the job, and its job file where one was given."""

    store: ObjectStore
    job: Job | None

    @property
    def lineage(self) -> Lineage:
        """The job's lineage."""
        return Lineage(self.store)

    def checkpoint(self, text: str, where: str = "STEP") -> CheckpointRef:
        """The checkpoint that `text` names: a step or `latest` a live one, ATTEMPT/STEP any that is committed. where:
        what the text is called in the PhalanxError for any other.
        """
        before, slash, after = text.rpartition("/")
        attempt, step = numbered(before), numbered(after)
        if not slash and (text == "latest" or step is not None):
            return live_checkpoint(self.lineage, step)
        if not attempt or step is None:
            expected = f"STEP, ATTEMPT/STEP or `latest`, each number of up to {MOST_DIGITS} digits"
            raise PhalanxError(where, value=text, expected=expected, remedy=_LIST)
        ref = CheckpointRef(attempt, step)
        try:
            self.store.info(keys.manifest(ref))
        except ObjectMissing as error:
            raise PhalanxError(where, value=text, expected="a committed checkpoint", remedy=_LIST) from error
        return ref

    @property
    def name(self) -> JobName | None:
        """What the job is called in a cluster, by the end of its root's URL; None where the URL ends otherwise."""
        match = re.search(r"(projects/[^/]+/jobs/[^/]+)/?$", self.store.url)
        return JobName.parse(match[1]) if match else None

    def policy(self, keep_latest: int | None = None) -> Policy:
        """What is kept of its checkpoints: as its job file says, or the one that it was created with; keep_latest
        instead of its key.
        """
        job, record = self.job, self.lineage.read_job()
        if job is None and record is not None:
            job = parse_job(record.spec, where=self.store.url)
        policy = Policy() if job is None else policy_of(job)
        return policy if keep_latest is None else replace(policy, keep_latest=keep_latest)

    def open(self, url: str) -> ObjectStore:
        """Another store that the job uses, with the settings its job file has for it."""
        return open_store(url) if self.job is None else store_at(self.job, url)

    @property
    def train_url(self) -> str | None:
        """The folder of the training split, or of the first of several (they have one tokenizer): the job file's, or
        the one that the job was created with.
        """
        if self.job is not None:
            return next(iter(self.job.data.training.values())).url
        record = self.lineage.read_job()
        data = record.spec.get("data") if record else None
        if not isinstance(data, dict):
            return None
        sources = data.get("sources") or {}
        url = sources[min(sources)].get("url") if sources else data.get("train")
        return url if isinstance(url, str) else None


def find_job(job: str, overrides: Sequence[str] = ()) -> JobPlace:
    """The place of `job`, a path or URL. Raises PhalanxError where the file is wrong or the root holds no job."""
    if "://" in job:
        place = JobPlace(open_store(job.rstrip("/")), None)
    else:
        spec = load_job(job, overrides)
        place = JobPlace(job_store(spec), spec)
    if place.lineage.newest_attempt() is None:
        raise PhalanxError(
            "JOB",
            value=place.store.url,
            expected="a job that has been started",
            remedy="name its job file, or the URL of its root: .../projects/PROJECT/jobs/NAME",
        )
    return place
