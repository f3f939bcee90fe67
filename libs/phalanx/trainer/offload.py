"""Whether this node's disk has the space that its ranks need for optimizer state, before any of them starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.planner.paging import amount, paging_of
from phalanx.spec import Job, Layout


def check_offload(job: Job, layout: Layout) -> str:
    """What the state takes on disk and in memory, in one line; nothing where it lies in memory. Raises PhalanxError
    for a folder that can't be used, or whose disk has too little space. A user's own model is counted by building it on
    the meta device.
    """
    if job.optimizer.offload == "none":
        return ""
    num_parameters = None
    if job.model.class_ is not None:
        from phalanx.parallel import count_parameters

        num_parameters = count_parameters(job)
    found = paging_of(job, layout, num_parameters)
    assert found is not None, "the job file was checked"
    folder = Path(found.folder).expanduser().absolute()
    existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise PhalanxError(
            "optimizer.offload_folder",
            value=found.folder,
            expected="a folder that can be written",
            remedy="name another one, on a local disk of every node",
        )
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < found.node_bytes:
        raise PhalanxError(
            "optimizer.offload_folder",
            value=found.folder,
            expected=f"{amount(found.node_bytes)} free for the optimizer state of the ranks of a node, where "
            f"{amount(free_bytes)} are",
            remedy="free space, name a folder on another disk, or spread the state over more ranks",
        )
    return found.said
