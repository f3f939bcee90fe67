"""The demo, chapter by chapter: prepare, start the services, run and be struck, change the layout, prove, compare,
export, sample.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from phalanx.checkpoint.export import export
from phalanx.checkpoint.place import JobPlace
from phalanx.checkpoint.target import hugging_face_target
from phalanx.cli.data_display import PrepareDisplay
from phalanx.cli.demo import jobs
from phalanx.cli.demo.cluster import Cluster, running_cluster
from phalanx.cli.demo.main_job import MainJob
from phalanx.cli.demo.records import StepFacts, step_facts
from phalanx.cli.demo.trouble import Trouble
from phalanx.cli.display import RunDisplay
from phalanx.core.errors import OutsideError
from phalanx.data.job_proof import prove_job
from phalanx.data.prepare.pipeline import prepare as prepare_data
from phalanx.data.prepare.report import PrepareReport
from phalanx.data.prepare.settings import PrepareSettings
from phalanx.data.prepare.sources import python_stdlib_corpus
from phalanx.data.proof import Proof
from phalanx.gang import ForkServer, GangOutcome, StopSignals
from phalanx.lineage.events import JobState
from phalanx.objects import open_store
from phalanx.spec import Job, Layout, load_job
from phalanx.trainer.local import run_job
from phalanx.trainer.places import job_store
from phalanx.trainer.preflight import prepare
from phalanx.trainer.tally import Tally

CORPUS_BYTES = 8_000_000
SMALL_CORPUS_BYTES = 200_000
BF16_BOUND = 1e-3
PROMPTS = ("def ", "import ", "class ")


@dataclass(slots=True)
class Findings:
    """What came out, chapter by chapter."""

    layouts: list[str] = field(default_factory=list)
    page_url: str = ""
    service_restarts: dict[str, int] = field(default_factory=dict)
    checkpoints: int = 0
    eval_loss: float | None = None
    facts: StepFacts | None = None
    trouble: Trouble | None = None
    proof: Proof | None = None
    small_proof: Proof | None = None
    reference_max_rel_diff: float | None = None
    export_dir: Path | None = None
    samples: tuple[str, ...] = ()


class Story:
    """One telling. An interruption ends it at once; the services of `services` commit and end with it."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        self._small_epoch_tokens = 0
        self.found = Findings()

    def prepare(self) -> Path:
        """Corpora, tokenizers, shards; returns the main job file."""
        self._title("1. A corpus: the source files of the Python standard library (up to 8 MB) as WebDataset shards")
        main = self._prepare_corpus(
            CORPUS_BYTES, "corpus", PrepareSettings(4096, shard_tokens=1 << 19, held_out_fraction=0.02)
        )
        held_out = 0 if main.held_out is None else main.held_out.num_tokens
        self._say(
            f"{main.train.num_documents:,} documents, {main.train.num_tokens:,} tokens, and {held_out:,} held out"
        )
        small = self._prepare_corpus(
            SMALL_CORPUS_BYTES, "small", PrepareSettings(1024, shard_tokens=1 << 15, held_out_fraction=0.0)
        )
        self._small_epoch_tokens = small.train.num_tokens
        return jobs.write_job(self._folder)

    def services(self, *, keep: bool) -> AbstractContextManager[Cluster]:
        """Data, train, checkpoint, monitor and an agent, each its own process, over mTLS on loopback."""
        self._title("2. The services: data, train, checkpoint and monitor, and an agent for 8 ranks")
        return running_cluster(self._folder / "home", keep=keep)

    def train(self, path: Path, cluster: Cluster) -> Job:
        """Both layouts of the main job; returns it as it was at the end."""
        first, second = load_job(path), load_job(path, jobs.SECOND_LAYOUT)
        self.found.layouts = [layout_name(job.layout(job.cluster.world_size)) for job in (first, second)]
        self.found.page_url = cluster.state.page_url
        self._say(f"the monitor's page: {self.found.page_url}", style="bold cyan")
        main_job = MainJob(cluster, self._console)
        self.found.trouble = main_job.trouble
        self._title(
            "3. Submitted over gRPC: 8 ranks in bf16, pp 2 x dp_shard 2 x tp 2, interleaved 1F1B; "
            "a rank and each service get SIGKILL on the way"
        )
        main_job.submit(path)
        main_job.run_until(JobState.STOPPED, stops=True)
        self._title("4. Stopped and committed; resumed with 4 ranks (dp_shard 4), and the agent gets SIGKILL")
        main_job.resume(jobs.SECOND_LAYOUT)
        main_job.run_until(JobState.SUCCEEDED)
        main_job.close()
        if main_job.trouble.num_left:
            raise OutsideError(f"{main_job.trouble.num_left} of the demo's strikes never came")
        self.found.checkpoints = main_job.num_checkpoints
        self.found.service_restarts = cluster.restarts
        evaluations = cluster.client.monitor.run(main_job.name).evaluations
        self.found.eval_loss = evaluations[-1].loss if evaluations else None
        self.found.facts = step_facts(second)
        return second

    def prove(self, job: Job, server: ForkServer) -> None:
        """The check of the main job's records, and of two whole epochs of the small corpus in one process."""
        self._title("5. Proof: step records along the live lineage against a reading by plain webdataset")
        assert self.found.trouble is not None, "the main job comes first"
        self.found.proof = self._prove(job, self.found.trouble.progress)
        small = jobs.two_epoch_job(self._folder / "job.toml", self._folder, self._small_epoch_tokens)
        self._run_alone(small, server)
        self.found.small_proof = self._prove(small, {})

    def compare(self, path: Path, server: ForkServer) -> None:
        """The loss of the first steps in one uninterrupted process."""
        self._title(f"6. Reference: the first {jobs.REFERENCE_STEPS} steps in one uninterrupted process")
        assert self.found.facts is not None, "the main job comes first"
        reference = self._run_alone(jobs.reference_job(path), server).losses
        losses = self.found.facts.losses
        difference = max(abs(losses[step] - loss) / abs(loss) for step, loss in reference.items())
        self.found.reference_max_rel_diff = difference
        self._say(f"largest relative difference of the loss: {difference:.1e} (bound {BF16_BOUND:.0e})")
        if not difference <= BF16_BOUND:
            raise OutsideError(f"the loss differs from one process by {difference:.1e}, more than {BF16_BOUND:.0e}")

    def export(self, job: Job) -> None:
        """The newest checkpoint as a Hugging Face folder, and a few lines sampled from it."""
        from phalanx.models.sample import sample_texts

        self._title("7. Export to Hugging Face format, and a few sampled lines")
        place = JobPlace(job_store(job), job)
        out = self._folder / "export"
        export(place.store, place.lineage.manifest(place.checkpoint("latest")), out, hugging_face_target(place, None))
        self.found.export_dir = out
        self.found.samples = tuple(sample_texts(out, PROMPTS, num_tokens=32, seed=0))
        for text in self.found.samples:
            self._say(repr(text))

    def _prepare_corpus(self, num_bytes: int, name: str, settings: PrepareSettings) -> PrepareReport:
        source = python_stdlib_corpus(num_bytes)
        with PrepareDisplay(self._console) as display:
            return prepare_data(source, open_store(f"{self._folder.as_uri()}/{name}"), settings, display.observe)

    def _run_alone(self, job: Job, server: ForkServer) -> Tally:
        """A job without services, to its end in this process's own gang."""
        prepared = prepare(job, job.cluster.world_size)
        stop = StopSignals()
        with RunDisplay(self._console, job.training.steps, job.job.name) as display, stop:
            outcome = run_job(prepared, server, display.observe, stop=stop)
        _settle(job, outcome, stop)
        return display.tally

    def _prove(self, job: Job, progress: dict[int, int]) -> Proof:
        proof = prove_job(job, progress)
        self._say(
            f"{job.job.name}: {proof.windows:,} windows of {proof.steps} steps, {proof.samples_missing} missing, "
            f"{proof.samples_repeated} repeated; {proof.steps_redone} steps redone; "
            f"{proof.bytes_compared:,} bytes of tokens compared"
        )
        if not proof.ok:
            raise OutsideError(f"the proof of {job.job.name} fails: {'; '.join(proof.mismatches) or proof}")
        return proof

    def _title(self, text: str) -> None:
        self._say(f"\n{text}", style="bold")

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _settle(job: Job, outcome: GangOutcome, stop: StopSignals) -> None:
    """Insists on a good end."""
    if stop.count:
        raise KeyboardInterrupt
    if outcome.state != "ok":
        raise OutsideError(f"{job.job.name} ended as {outcome.state}, expected ok: {outcome.first_cause}")


def layout_name(layout: Layout) -> str:
    """A layout in words; axes of size 1 are left out."""
    sizes = {axis: getattr(layout, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one process"
