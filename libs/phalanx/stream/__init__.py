"""Data in a rank: the shard format, the order (pure), windows and the batch rule. Free of torch: numpy
arrays come out.
"""

from phalanx.stream.batch import num_slots, slots
from phalanx.stream.documents import Document, Documents
from phalanx.stream.documents import open_documents as open
from phalanx.stream.manifest import Split, open_split, refuse_held_out
from phalanx.stream.members import DamagedShard, ShardIndices
from phalanx.stream.order import Order, Segment, SegmentColumns
from phalanx.stream.shards import ShardIndex
from phalanx.stream.windows import ReadRows, WindowBatch, WindowReader

__all__ = [
    "DamagedShard",
    "Document",
    "Documents",
    "Order",
    "ReadRows",
    "Segment",
    "SegmentColumns",
    "ShardIndex",
    "ShardIndices",
    "Split",
    "WindowBatch",
    "WindowReader",
    "num_slots",
    "open",
    "open_split",
    "refuse_held_out",
    "slots",
]
