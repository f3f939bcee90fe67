"""What the head and the loss hold on the rank of the last stage, by the moment: nothing of it is there all the time.

Bytes of a token and of a column of the vocabulary, with logits in b bytes. Where the vocabulary is whole and the loss
is the plain one: the logits, and in fp32 their log-probabilities, which stay for backward and become the gradient
there: b + 4. Where the vocabulary is cut, by chunks, with the z-loss and with a loss of the user's: the logits, the
exponentials in fp32, and where b < 4 a copy of the logits in fp32 on the way to them; in backward as many. Once the
loss's backward is over, the logits' gradient is left, b, beside the head's, until the product is over too; then the
head's alone, until it is reduced.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.planner.shape import ModelShape, RunShape
from phalanx.planner.stages import num_micro_batches
from phalanx.spec.layout import Layout

_FP32 = 4


@dataclass(frozen=True, slots=True)
class HeadBytes:
    """Bytes beside the layers' activations.

    in_loss: while the loss of a micro-batch, or its gradient, is computed. in_product: while the gradients of the head
    and of what it took are; the head's own not counted. behind: of micro-batches whose backward is still to come, while
    another one's goes through the layers.
    """

    in_loss: float = 0.0
    in_product: float = 0.0
    behind: float = 0.0


def head_bytes(model: ModelShape, layout: Layout, run: RunShape) -> HeadBytes:
    """Of the rank that holds the last stage."""
    tokens = run.seq_len * run.local_batch_size // layout.cp
    width = run.param_bytes
    columns = model.vocab_size / layout.tp
    # The final norm's input in fp32 and what it gives, and that whole on every tp rank, as the head takes it.
    final = tokens * model.dim * ((_FP32 + width) / layout.tp + width)
    waiting = _micro_batches_behind(layout, run)
    of_input = tokens * model.dim * width
    if run.chunk_tokens:
        # Logits of one chunk; the sum of their gradients of the head, in fp32, which is rounded in the end.
        chunk = min(run.chunk_tokens, tokens) * columns * _apart(width)
        total, rounded = _FP32 * columns * model.dim, (width if width < _FP32 else 0) * columns * model.dim
        behind = waiting * final
        return HeadBytes(behind + final + chunk + of_input + total, behind + final + of_input + total + rounded, behind)
    logit = width + _FP32 if layout.tp == 1 and run.plain_loss else _apart(width)
    behind = waiting * (final + tokens * columns * _FP32)
    in_product = final + tokens * columns * width + of_input
    return HeadBytes(behind + final + tokens * columns * logit, behind + in_product, behind)


def _apart(width: int) -> int:
    """Bytes of a logit whose exponentials lie beside it."""
    return 2 * _FP32 if width == _FP32 else width + 2 * _FP32


def _micro_batches_behind(layout: Layout, run: RunShape) -> int:
    """Micro-batches that have passed the head, beside the one whose backward is first: all others where every forward
    comes before, none where the last stage's backward follows its forward.
    """
    return num_micro_batches(layout, run) - 1 if layout.pp > 1 and run.schedule in {"gpipe", "looped_bfs"} else 0
