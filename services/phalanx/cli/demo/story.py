"""The demo, chapter by chapter: prepare, run, lose a rank, change the layout, prove, compare, export, sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from phalanx.checkpoint.export import export
from phalanx.checkpoint.place import JobPlace
from phalanx.checkpoint.target import hugging_face_target
from phalanx.cli.data_display import PrepareDisplay
from phalanx.cli.demo import jobs
from phalanx.cli.demo.trouble import VICTIM_RANK, Trouble
from phalanx.cli.display import RunDisplay
from phalanx.core.errors import OutsideError
from phalanx.data.job_proof import prove_job
from phalanx.data.prepare.pipeline import prepare as prepare_data
from phalanx.data.prepare.report import PrepareReport
from phalanx.data.prepare.settings import PrepareSettings
from phalanx.data.prepare.sources import python_stdlib_corpus
from phalanx.data.proof import Proof
from phalanx.gang import Event, ForkServer, GangOutcome, StopSignals
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

    tally: Tally
    layouts: list[str] = field(default_factory=list)
    proof: Proof | None = None
    small_proof: Proof | None = None
    reference_max_rel_diff: float | None = None
    export_dir: Path | None = None
    samples: tuple[str, ...] = ()


class Story:
    """One telling. An interruption ends it with KeyboardInterrupt: at once, or, while ranks live, after a commit."""

    def __init__(self, folder: Path, console: Console, server: ForkServer) -> None:
        self._folder, self._console, self._server = folder, console, server
        self._stop = StopSignals()
        self._small_epoch_tokens = 0
        self.trouble = Trouble(self._stop)
        self.found = Findings(Tally())

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

    def train(self, path: Path) -> Job:
        """Both layouts of the main job; returns it as it was at the end."""
        first, second = load_job(path), load_job(path, jobs.SECOND_LAYOUT)
        self._title(
            "2. Training on 8 ranks in bf16: pp 2 x dp_shard 2 x tp 2, interleaved 1F1B; "
            f"rank {VICTIM_RANK} gets SIGKILL on the way"
        )
        with RunDisplay(self._console, first.training.steps, first.job.name) as display:
            self._run(first, display, self._watch_trouble, expected="stopped")
            self._title("3. Interrupted and committed; the same job goes on with 4 ranks (dp_shard 4)")
            self._run(second, display, self.trouble.observe, expected="ok")
        self.found.tally = display.tally
        return second

    def prove(self, job: Job) -> None:
        """The check of the main job's records, and of two whole epochs of the small corpus in one process."""
        self._title("4. Proof: step records along the live lineage against a reading by plain webdataset")
        self.found.proof = self._prove(job, self.trouble.progress)
        small = jobs.two_epoch_job(self._folder / "job.toml", self._folder, self._small_epoch_tokens)
        self._run_alone(small)
        self.found.small_proof = self._prove(small, {})

    def compare(self, path: Path) -> None:
        """The loss of the first steps in one uninterrupted process."""
        self._title(f"5. Reference: the first {jobs.REFERENCE_STEPS} steps in one uninterrupted process")
        reference = self._run_alone(jobs.reference_job(path)).losses
        losses = self.found.tally.losses
        difference = max(abs(losses[step] - loss) / abs(loss) for step, loss in reference.items())
        self.found.reference_max_rel_diff = difference
        self._say(f"largest relative difference of the loss: {difference:.1e} (bound {BF16_BOUND:.0e})")
        if not difference <= BF16_BOUND:
            raise OutsideError(f"the loss differs from one process by {difference:.1e}, more than {BF16_BOUND:.0e}")

    def export(self, job: Job) -> None:
        """The newest checkpoint as a Hugging Face folder, and a few lines sampled from it."""
        from phalanx.models.sample import sample_texts

        self._title("6. Export to Hugging Face format, and a few sampled lines")
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

    def _run(self, job: Job, display: RunDisplay, also: Callable[[Event], None], expected: str) -> None:
        prepared = prepare(job, job.cluster.world_size)
        self.found.layouts.append(layout_name(prepared.layout))

        def on_event(event: Event) -> None:
            display.observe(event)
            also(event)

        with self._stop:  # only while ranks live: elsewhere an interruption may end the story at once
            outcome = run_job(prepared, self._server, on_event, on_start=self.trouble.on_start, stop=self._stop)
        self._settle(job, outcome, expected)

    def _watch_trouble(self, event: Event) -> None:
        had_victim = self.trouble.victim_pid is not None
        self.trouble.observe(event)
        if not had_victim and self.trouble.victim_pid is not None:
            self._say(f"SIGKILL to rank {VICTIM_RANK} (pid {self.trouble.victim_pid})", style="red")

    def _settle(self, job: Job, outcome: GangOutcome, expected: str) -> None:
        """Takes the story's own stop back, and insists on the expected end."""
        if expected == "stopped" and self.trouble.interrupted and self._stop.count == 1:
            self._stop.count = 0
        if self._stop.count:
            raise KeyboardInterrupt
        if outcome.state != expected or (outcome.first_cause is not None and outcome.state == "stopped"):
            raise OutsideError(f"{job.job.name} ended as {outcome.state}, expected {expected}: {outcome.first_cause}")

    def _run_alone(self, job: Job) -> Tally:
        with RunDisplay(self._console, job.training.steps, job.job.name) as display:
            self._run(job, display, lambda _: None, expected="ok")
        self.found.layouts.pop()
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


def layout_name(layout: Layout) -> str:
    """A layout in words; axes of size 1 are left out."""
    sizes = {axis: getattr(layout, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one process"
