"""The door for programs that save with `torch.distributed.checkpoint` (docs/checkpoint-torch.md).

`save`, `async_save` and `load` do it in one line each; `PhalanxWriter` and `PhalanxReader` serve programs that call
`dcp.save` and `dcp.load` themselves. What is written is a Phalanx checkpoint like any other: create-only safetensors
objects, verified in chunks when they are read, without a pickle. This package imports torch.
"""

from phalanx.snapshot.dcp.door import async_save, latest_step, load, save
from phalanx.snapshot.dcp.reader import PhalanxReader
from phalanx.snapshot.dcp.saving import Saving
from phalanx.snapshot.dcp.writer import PhalanxWriter

__all__ = ["PhalanxReader", "PhalanxWriter", "Saving", "async_save", "latest_step", "load", "save"]
