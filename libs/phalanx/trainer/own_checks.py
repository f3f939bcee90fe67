"""What needs the user's own class and functions to be checked, before a rank starts: on the meta device and on tensors
of a few elements. torch is imported only where a job names something of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.core.errors import PhalanxError
from phalanx.spec import Job, Layout

if TYPE_CHECKING:
    from torch import nn

    from phalanx.models.protocol import Style

PROBED_VOCABULARY = 64
# What a forward may not find on the meta device though ranks have it: values, a GPU's kernels, types, a rank's place.
_ONLY_IN_RANKS = re.compile(
    r"\bmeta\b|dtype|scalar type|cuda|triton|fake ?tensor|process group|RANK\b|WORLD_SIZE|MASTER_", re.IGNORECASE
)


def check_own(job: Job, layout: Layout, vocab_size: int = 0) -> None:
    """Raises PhalanxError, in one line, for the first thing of the user's own that the ranks could not run: a class or
    function that is not there or fails, a method that the layout needs, a loss that is no sum over tokens, an
    optimizer whose rule is not element-wise. vocab_size: of the tokenizer, 0 where it is not known.
    """
    if not job.own_names:
        return
    if job.model.class_ is not None:
        _check_model(job, layout, vocab_size)
    if job.optimizer.class_ is not None:
        from phalanx.trainer.own_optimizer import rule_of

        rule_of(job)
    _check_functions(job, layout)


def _check_model(job: Job, layout: Layout, vocab_size: int) -> None:
    """By the rules of `parallel`, told with the keys of the job file."""
    import torch

    from phalanx.models.protocol import HasHead
    from phalanx.parallel.build import build_on_meta, check_head, check_layout, user_class
    from phalanx.parallel.float8 import require_linears
    from phalanx.parallel.own_model import check_shared, initial_of, plan_of
    from phalanx.parallel.pipeline import stage_shapes
    from phalanx.parallel.tensor import check_patterns, check_plan
    from phalanx.parallel.whole import is_whole

    try:
        user_class(str(job.model.class_))
        model = build_on_meta(job)
        sizes = {axis: getattr(layout, axis) for axis in ("pp", "cp", "tp")}
        check_layout(model, sizes, job.training.seq_len)
        check_head(model, job.loss.chunk_tokens)
        if not is_whole(job, layout):
            check_shared(model)
        initial_of(model)
        plan = plan_of(model)
        width = _check_forward(job, vocab_size) if job.cluster.device == "cpu" else None
        if job.optimizer.name == "muon":
            _check_hidden(model)
        if job.training.float8_recipe != "none":
            require_linears(model)
        if layout.pp > 1:
            if job.loss.chunk_tokens:
                assert isinstance(model, HasHead), "check_head refused it"
                model.detach_head()
            stages = check_stages(model, layout.pp * job.parallel.stages_per_rank)
            _check_methods(stages, has_context=layout.cp > 1, has_head=job.loss.chunk_tokens > 0)
            stage_shapes(
                stages,
                job.parallel.local_batch_size,
                job.training.seq_len,
                torch.float32,
                cp=layout.cp,
                tp=layout.tp,
                gives_logits=not job.loss.chunk_tokens,
            )
        if layout.tp > 1:
            check_patterns(model, plan)
            check_plan(model, plan, layout.tp)
            if width is not None and layout.cp == 1:
                _check_cut_forward(job, plan, layout.tp, width)
    except PhalanxError as error:
        where = error.where.replace("[model] class", "model.class", 1).replace("[", "", 1).replace("] ", ".", 1)
        raise PhalanxError(
            where.rstrip("]"), value=error.value, expected=error.expected, remedy=error.remedy
        ) from error


def _check_forward(job: Job, vocab_size: int) -> int | None:
    """Of one window on the meta device. Gives the width of the logits, None where what only real tensors have is left
    to the ranks to find out.
    """
    from phalanx.parallel.build import build_on_meta

    wanted = f"forward to give logits [1 window, {job.training.seq_len} tokens, vocabulary]"
    shape = _logits_shape(job, build_on_meta(job), "[model] class", wanted, job.model.class_)
    if shape is None:
        return None
    if job.loss.fn is None and shape[2] < vocab_size:
        raise PhalanxError(
            "[model.args]",
            value=job.model.args,
            expected=f"logits of at least the tokenizer's {vocab_size} tokens, where forward gives {shape[2]}",
            remedy="give the model a larger vocabulary, or prepare the data with a smaller tokenizer",
        )
    return shape[2]


def _check_cut_forward(job: Job, plan: Mapping[str, Style], tp: int, width: int) -> None:
    """The same of what the first of `tp` ranks has. width: of the logits of the whole model."""
    from phalanx.parallel.build import build_on_meta
    from phalanx.parallel.tensor import check_plan

    model = build_on_meta(job)
    check_plan(model, plan, tp)
    length = job.training.seq_len
    wanted = f"styles with which forward gives logits [1 window, {length} tokens, {width} / {tp}] on each rank"
    shape = _logits_shape(job, model, "parallel_plan()", wanted)
    if shape is not None and shape[2] * tp != width:
        raise PhalanxError(
            "parallel_plan()",
            expected=f"{wanted}, not of shape {tuple(shape)}",
            remedy="give the head the style vocab_head",
        )


def _logits_shape(job: Job, model: nn.Module, where: str, wanted: str, value: object = None) -> tuple[int, ...] | None:
    """Of what a forward of one window gives on the meta device, with weights of the type that ranks compute in. None
    where it needs what only real tensors have. Raises PhalanxError where it fails or gives no logits of whole windows.
    """
    import torch

    from phalanx.models.own import calling_own

    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, job.training.mixed_precision_param))
    ids = torch.zeros(1, job.training.seq_len, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), torch.device("meta"), calling_own(where, wanted, value):
            found = model(ids, ids, ids if job.data.document_mask else None)
    except PhalanxError as error:
        if isinstance(error.__cause__, NotImplementedError) or _ONLY_IN_RANKS.search(str(error.__cause__)):
            return None
        raise
    is_tensor = isinstance(found, torch.Tensor)
    if not (is_tensor and found.is_floating_point() and found.dim() == 3 and found.shape[:2] == ids.shape):
        shown = f"{found.dtype} of shape {tuple(found.shape)}" if is_tensor else f"a {type(found).__name__}"
        raise PhalanxError(where, value=value, expected=f"{wanted}, not {shown}", remedy="see phalanx.models.protocol")
    return tuple(found.shape)


def _check_hidden(model: nn.Module) -> None:
    from phalanx.trainer.muon import is_hidden

    if not any(is_hidden(name, parameter.shape) for name, parameter in model.named_parameters()):
        raise PhalanxError(
            "optimizer.name",
            value="muon",
            expected=f"adamw with {type(model).__name__}, which has no matrix inside `layers` for Muon to update",
            remedy="set it to adamw, or name the list of blocks `layers`",
        )


def check_stages(model: nn.Module, num_stages: int) -> Sequence[nn.Module]:
    """The stages. Raises PhalanxError where `split_stages` gives another number of them, or not every parameter of the
    model to one stage under the name that it has in the model.
    """
    from phalanx.parallel.own_model import stages_of_model

    stages = stages_of_model(model, num_stages)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    expected = {name for name, _ in model.named_parameters()}
    wrong = sorted(set(names) ^ expected) or sorted(name for name in expected if names.count(name) != 1)
    if wrong:
        raise PhalanxError(
            "split_stages()",
            value=", ".join(wrong[:3]),
            expected="every parameter of the model in one stage, under the name that it has in the model",
            remedy="give the stages the model's own modules under their own names",
        )
    return stages


def _check_methods(stages: Sequence[nn.Module], *, has_context: bool, has_head: bool) -> None:
    """What the model's own methods promise of its stages."""
    from phalanx.models.protocol import HasContext, HasHead

    if has_context and not all(isinstance(stage, HasContext) for stage in stages):
        raise PhalanxError(
            "split_stages()",
            expected="stages with set_context(context), as parallel.cp is above 1",
            remedy="give each stage the method",
        )
    last = stages[-1]
    if has_head and not (isinstance(last, HasHead) and last.head is not None):
        raise PhalanxError(
            "split_stages()",
            expected="a last stage with `head`, as loss.chunk_tokens is above 0",
            remedy="give it the head of the model",
        )


def _check_functions(job: Job, layout: Layout) -> None:
    if job.loss.fn is None and not job.metrics.fn:
        return
    from phalanx.parallel.own import check_gradient, check_token_sum

    given = getattr(job.model.args, "vocab_size", None)
    if isinstance(job.model.args, dict):
        given = job.model.args.get("vocab_size")
    vocab_size = min(given, PROBED_VOCABULARY) if isinstance(given, int) and given > 1 else PROBED_VOCABULARY
    if job.loss.fn is not None:
        check_token_sum("loss.fn", job.loss.fn, job.loss.args, vocab_size, cuts_windows=layout.cp > 1)
        check_gradient(job.loss.fn, job.loss.args, vocab_size)
    for name, path in job.metrics.fn.items():
        check_token_sum(f"metrics.fn.{name}", path, {}, vocab_size, cuts_windows=layout.cp > 1)
