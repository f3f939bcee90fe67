"""`phalanx.Client`: everything that a user does with a cluster, as typed calls.

    with phalanx.Client() as client:
        job = client.submit(Path("job.toml")).job
        client.wait(job.name)

A job is named `NAME`, `PROJECT/NAME` or `projects/PROJECT/jobs/NAME`. Errors: PhalanxError for what the caller must
change, OutsideError for what is broken. Each part of the cluster also has its own typed client here: `train`, `data`,
`checkpoint`, `monitor`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jwt

from phalanx.checkpoint.client import CheckpointClient, connect_checkpoint
from phalanx.core.errors import PhalanxError
from phalanx.data.client import DataClient, DatasetVersion, connect_data
from phalanx.lineage.events import JobState
from phalanx.lineage.registry import JobName
from phalanx.monitor.client import MonitorClient, connect_monitor
from phalanx.rpc import ClientConfig, TimedOut, Unavailable, find_client
from phalanx.rpc.credentials import TokenFile
from phalanx.spec import Job, load_job, parse_job
from phalanx.spec.job import plain
from phalanx.train.client import LogPiece, TrainClient, connect_train
from phalanx.train.values import EventView, JobView, NodeView, Submitted

LOG = logging.getLogger(__name__)

DEFAULT_PROJECT = "default"
PATIENCE_S = 5.0
AWAY_S = 60.0


def job_name(text: str) -> str:
    """`projects/P/jobs/NAME` of whatever form a user wrote. Raises PhalanxError."""
    _require_text("job", text)
    if text.endswith(".toml"):
        raise PhalanxError(
            "job",
            value=text,
            expected="the name of a submitted job, not its file",
            remedy="name it as its file does under [job], or as `phalanx job ls` does",
        )
    parts = text.split("/")
    if len(parts) == 1:
        parts = ["projects", DEFAULT_PROJECT, "jobs", *parts]
    elif len(parts) == 2:
        parts = ["projects", parts[0], "jobs", parts[1]]
    try:
        return str(JobName.parse("/".join(parts)))
    except PhalanxError as error:
        raise PhalanxError(
            "job", value=text, expected="NAME, PROJECT/NAME or projects/PROJECT/jobs/NAME", remedy="correct the name"
        ) from error


class Client:
    """The services of one cluster. context: a file such as HOME/client.toml; None looks for $PHALANX_CONTEXT, then
    ./phalanx-home/client.toml. patience_s: how long a call waits for a service that is not up.
    """

    def __init__(self, context: Path | None = None, *, patience_s: float = PATIENCE_S) -> None:
        self._config: ClientConfig = find_client(context)
        self._patience_s = patience_s
        self._open = ExitStack()

    @cached_property
    def train(self) -> TrainClient:
        """Jobs and nodes."""
        return self._open.enter_context(connect_train(self._config, patience_s=self._patience_s))

    @cached_property
    def data(self) -> DataClient:
        """Datasets."""
        return self._open.enter_context(connect_data(self._config, patience_s=self._patience_s))

    @cached_property
    def checkpoint(self) -> CheckpointClient:
        """Checkpoints."""
        return self._open.enter_context(connect_checkpoint(self._config, patience_s=self._patience_s))

    @cached_property
    def monitor(self) -> MonitorClient:
        """What runs measure, and their incidents."""
        return self._open.enter_context(connect_monitor(self._config, patience_s=self._patience_s))

    @property
    def subject(self) -> str:
        """Who this client is, by its token; jobs that it submits belong to it."""
        path = self._config.security.token
        if path is None:
            return ""
        token = TokenFile(path).read()
        try:
            claims: dict[str, Any] = jwt.decode(token, options={"verify_signature": False})
            return str(claims["sub"])
        except (jwt.InvalidTokenError, KeyError) as error:
            raise PhalanxError(
                str(path), expected=f"a token ({error})", remedy="run `phalanx up`, which makes it again"
            ) from error

    # Jobs.

    def submit(
        self,
        job: Path | Job,
        overrides: Sequence[str] = (),
        *,
        request_id: str = "",
        dry_run: bool = False,
    ) -> Submitted:
        """Submits a job file, or a job. The same request id again gives the same job. dry_run: only checks.

        The folder that `code.path` names is packed here and put into the job's storage, so this machine must reach it.
        """
        if not isinstance(job, Job):
            _require_text("job", job, Path)
        value = job if isinstance(job, Job) else load_job(Path(job), overrides)
        packed = _with_code(value, ships=not dry_run)
        return self.train.submit(absolute(plain(packed)), request_id=request_id, dry_run=dry_run)

    def fork(
        self,
        source: str,
        at: str = "latest",
        overrides: Sequence[str] = (),
        *,
        name: str = "",
        request_id: str = "",
        dry_run: bool = False,
    ) -> Submitted:
        """Submits a new job that starts from a checkpoint of another one. at: `latest`, a step or `a<A>-s<step>`."""
        _refuse_relative(overrides)
        return self.train.fork(
            job_name(source), at, name=name, overrides=tuple(overrides), request_id=request_id, dry_run=dry_run
        )

    def job(self, name: str) -> JobView:
        """A job as it stands."""
        return self.train.get(job_name(name))

    def jobs(self, *, mine: bool = False, states: Sequence[JobState] = ()) -> Iterator[JobView]:
        """Jobs, newest first."""
        return self.train.list(owner=self.subject if mine else "", states=tuple(states))

    def watch(self, name: str, after_revision: int = 0) -> Iterator[EventView]:
        """The events of a job behind a revision, each once, for ever; through restarts of the service."""
        return self.train.watch(job_name(name), after_revision)

    def logs(
        self, name: str, rank: int = 0, *, attempt: int = 0, offset: int = 0, follow: bool = False
    ) -> Iterator[LogPiece]:
        """What a rank printed. attempt: 0 for the newest. offset: first byte, negative from the end."""
        return self.train.logs(job_name(name), rank, attempt=attempt, offset=offset, follow_on=follow)

    def wait(self, name: str, deadline_s: float | None = None) -> JobView:
        """The job once it has succeeded, failed or was stopped; a service that is restarted meanwhile is waited for.

        Raises TimedOut past the deadline, and what the service raises once it is away for longer than a minute.
        """
        end_s = None if deadline_s is None else time.monotonic() + deadline_s
        last_heard_s = time.monotonic()
        while True:
            left_s = None if end_s is None else end_s - time.monotonic()
            try:
                return self.train.wait(job_name(name), timeout_s=left_s)
            except TimedOut:
                if end_s is not None and time.monotonic() >= end_s:
                    raise
            except Unavailable:
                if time.monotonic() - last_heard_s > AWAY_S:
                    raise
                continue
            last_heard_s = time.monotonic()

    def stop(self, name: str, *, request_id: str = "", expected_revision: int = 0) -> JobView:
        """Has the job commit a checkpoint and end."""
        return self.train.stop(job_name(name), request_id=request_id, expected_revision=expected_revision)

    def suspend(self, name: str, *, request_id: str = "", expected_revision: int = 0) -> JobView:
        """Has the job commit a checkpoint and leave its nodes."""
        return self.train.suspend(job_name(name), request_id=request_id, expected_revision=expected_revision)

    def resume(
        self,
        name: str,
        overrides: Sequence[str] = (),
        *,
        code: Path | None = None,
        request_id: str = "",
        expected_revision: int = 0,
    ) -> JobView:
        """Goes on with a job that was suspended, stopped or failed; overrides change placement and free keys.

        code: a folder whose code the job's ranks run from here on, packed as `submit` packs that of `code.path`.
        """
        _refuse_relative(overrides)
        if code is not None:
            overrides = (*overrides, *self._with_new_code(name, code, overrides))
        return self.train.resume(
            job_name(name), tuple(overrides), request_id=request_id, expected_revision=expected_revision
        )

    def _with_new_code(self, name: str, folder: Path, overrides: Sequence[str]) -> tuple[str, ...]:
        """The overrides with which the job takes the code of a folder, which is packed in its storage then."""
        other = next((each for each in overrides if each.startswith("code.")), None)
        if other is not None:
            raise PhalanxError("code", value=other, expected="a folder or keys of [code], not both", remedy="give one")
        job = parse_job(dict(self.job(name).spec), where=name)
        chosen = {"path": str(folder.absolute()), "digest": None, "on_change": "take"}
        packed = _with_code(job.model_copy(update={"code": job.code.model_copy(update=chosen)}), ships=True)
        return (f"code.path={json.dumps(packed.code.path)}", f"code.digest={json.dumps(packed.code.digest)}")

    def checkpoint_now(self, name: str, *, request_id: str = "") -> JobView:
        """Has a checkpoint taken at the next step boundary; it follows as an event."""
        return self.train.checkpoint_now(job_name(name), request_id=request_id)

    def stacks(self, name: str, ranks: Sequence[int] = ()) -> dict[int, str]:
        """The Python stacks of a running job's ranks."""
        return dict(self.train.stacks(job_name(name), tuple(ranks)))

    def nodes(self) -> tuple[NodeView, ...]:
        """The nodes of the cluster."""
        return tuple(self.train.nodes())

    # Data.

    def register(self, name: str, url: str, *, request_id: str = "", made_from: Sequence[str] = ()) -> DatasetVersion:
        """Adds what `phalanx data prepare` wrote at `url` to the catalog. made_from: registered versions that it was
        made from, each as `NAME@VERSION`.
        """
        return self.data.register(name, absolute_url(url), request_id=request_id or None, made_from=made_from)

    def mix(self, name: str, weights: Mapping[str, str], *, request_id: str = "") -> int:
        """Asks for other weights of a job's sources, as text by name; they hold from its next reading plan on. Returns
        the number of the wish.
        """
        return self.data.change_mixture(job_name(name), weights, request_id or None)

    def close(self) -> None:
        """Ends all connections."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _with_code(job: Job, *, ships: bool) -> Job:
    """The job with its code packed, and stored where it `ships`; what must be told of it is logged."""
    if job.code.path is None:
        return job
    from phalanx.trainer.shipping import with_code

    packed, told = with_code(job, ships=ships)
    for each in told:
        LOG.warning("%s", each)
    return packed


def absolute(spec: dict[str, Any]) -> dict[str, Any]:
    """The job file with URLs that mean the same in every process of this machine: relative ones start here. A relative
    `metrics.folder` stays: it starts where the agent was started, on its machine.
    """
    data = spec["data"]
    places: dict[str, Any] = {key: absolute_url(data[key]) for key in ("train", "held_out") if data.get(key)}
    if data.get("sources"):
        places["sources"] = {
            name: {**source, "url": absolute_url(source["url"])} for name, source in data["sources"].items()
        }
    return {
        **spec,
        "job": {**spec["job"], "storage": absolute_url(spec["job"]["storage"])},
        "data": {**data, **places},
    }


def absolute_url(url: str) -> str:
    """`file://./x`, `file://../x` and `file://~/x` as `file:///...`; every other URL as it is."""
    _require_text("url", url)
    rest = url.removeprefix("file://")
    if rest == url or rest.partition("/")[0] not in (".", "..", "~"):
        return url
    return f"file://{os.path.abspath(Path(rest).expanduser())}"  # noqa: PTH100 - links stay as the user chose them


def _require_text(what: str, value: object, *others: type) -> None:
    if not isinstance(value, (str, *others)):
        raise PhalanxError(what, value=repr(value)[:100], expected="text", remedy="correct the argument")


def _refuse_relative(overrides: Sequence[str]) -> None:
    for override in overrides:
        if "file://." in override or "file://~" in override:
            raise PhalanxError(
                "--set", value=override, expected="an absolute file:///... URL", remedy="write the whole path"
            )
