"""What an optimizer state on local disks takes there and in memory, as one says it before a run."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.planner.job_search import model_shape, run_shape
from phalanx.planner.memory import DISK_SLOTS, MOMENT_BYTES, paging_memory, rank_memory
from phalanx.spec.job import Job
from phalanx.spec.layout import Layout

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class Paging:
    """rank_bytes: in the file of the rank that has most. node_bytes: in those of a node's ranks. memory_bytes: of one
    rank, for pages.
    """

    folder: str
    rank_bytes: int
    node_bytes: int
    memory_bytes: int

    @property
    def said(self) -> str:
        """In one line."""
        return (
            f"optimizer state on disk: {amount(self.rank_bytes)} a rank, {amount(self.node_bytes)} a node, "
            f"in files without a name in {self.folder}; {amount(self.memory_bytes)} of memory a rank for its pages"
        )


def paging_of(job: Job, layout: Layout, num_parameters: int | None = None) -> Paging | None:
    """None where the state lies in memory. num_parameters: of a model that the planner does not know, whose state is
    taken to be cut evenly. Raises PhalanxError where such a model's are not given.
    """
    folder = job.optimizer.offload_folder
    if job.optimizer.offload == "none" or folder is None:
        return None
    if num_parameters is not None:
        cut = layout.pp * layout.dp_shard * layout.cp * layout.tp
        ranks = [DISK_SLOTS * MOMENT_BYTES * -(-num_parameters // cut)]
    else:
        ranks = [rank.disk_bytes for rank in rank_memory(model_shape(job), layout, run_shape(job), 0)]
    a_node = min(job.cluster.nproc, layout.world_size)
    # Ranks of one pipeline position lie on one node or on several; of several nodes the fullest counts.
    mean = sum(ranks) / len(ranks) if a_node == layout.world_size else max(ranks)
    memory_bytes = paging_memory(int(job.optimizer.offload_gib * GIB))
    return Paging(folder, max(ranks), int(mean * a_node), memory_bytes)


def amount(num_bytes: int) -> str:
    """In GiB, or in MiB below one."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.1f} MiB"
