"""Whether the counts of a row of published measurements agree with one another."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.core.errors import PhalanxError
from phalanx.planner import count_parameters

from .fields import Row, checked
from .rows import Read

# A printed number of parameters may leave out embeddings or count them twice; beyond this factor it is another model's.
_MOST_PARAMETERS_APART = 2.0
# Some stacks count the embedding and the head as a layer each when they cut a pipeline.
_EXTRA_LAYERS = 2


def check_counts(read: Read, row: Row) -> None:
    """Raises PhalanxError for the first count of the row that another one contradicts: of the model's parts, of GPUs,
    stages or the batch."""
    fields = checked(row, [])
    for where, value, expected in (
        *_of_model(read, fields["model"]),
        *_of_layout(read, fields),
        *_of_batch(read, fields["parallel"]),
    ):
        raise PhalanxError(where, value=value, expected=expected, remedy="correct the row")


def _of_model(read: Read, given: Row) -> Iterator[tuple[str, object, str]]:
    """(where, value, what was expected) of each count of the model that can't be."""
    model = read.config.model
    for name, part, most in (
        ("topk", model.top_k, model.num_experts),
        ("dense_layers", model.num_dense_layers, model.n_layers),
        ("kv_heads", model.n_kv_heads, model.n_heads),
    ):
        if part > most:
            yield f"model.{name}", part, f"at most {most}"
    both_given = given.get("heads") and given.get("hidden")
    if both_given and not given.get("head_dim") and not model.latent and model.dim % model.n_heads:
        yield "model.heads", model.n_heads, f"a divisor of the width {model.dim}, or head_dim"
    if given.get("kv_heads") and model.n_heads % model.n_kv_heads:
        yield "model.kv_heads", model.n_kv_heads, f"a divisor of the {model.n_heads} heads"
    if given.get("params") and given.get("hidden") and given.get("layers"):
        counted = count_parameters(model).total
        apart = float(given["params"]) / counted
        if not 1 / _MOST_PARAMETERS_APART <= apart <= _MOST_PARAMETERS_APART:
            yield "model.params", f"{given['params']:.4g}", f"about the {counted:.4g} that its shape has"


def _of_layout(read: Read, fields: Row) -> Iterator[tuple[str, object, str]]:
    model, layout, parallel = read.config.model, read.config.layout, fields["parallel"]
    count, per_node = fields["cluster"].get("count"), fields["cluster"].get("per_node")
    if count and layout.world_size != count:
        yield "parallel", f"{layout.world_size} ranks (dp x tp x pp x cp)", f"the cluster's {count} GPUs"
    if per_node and count and per_node > count:
        yield "cluster.per_node", per_node, f"at most the cluster's {count} GPUs"
    stages = layout.pp * (parallel.get("vp") or 1)
    layers = model.n_layers + _EXTRA_LAYERS * (parallel.get("pp_partition") is not None or stages > layout.pp)
    if fields["model"].get("layers") and layout.pp > 1 and stages > layers:
        name = "pp" if layout.pp > layers else "vp"
        yield f"parallel.{name}", parallel.get(name), f"at most {layers} stages for {model.n_layers} layers"
    if layout.tp > model.n_heads:
        yield "parallel.tp", layout.tp, f"at most the {model.n_heads} heads"
    if model.num_experts and layout.ep > model.num_experts:
        yield "parallel.ep", layout.ep, f"at most the {model.num_experts} experts"


def _of_batch(read: Read, parallel: Row) -> Iterator[tuple[str, object, str]]:
    run, layout = read.config.run, read.config.layout
    at_once = run.local_batch_size * layout.dp
    if run.global_batch_size % at_once:
        micro = f"{layout.dp} replicas x micro-batch {run.local_batch_size}"
        yield "parallel.global_batch", run.global_batch_size, f"a multiple of {micro}"
    for name in ("grad_accum", "microbatches"):
        steps = parallel.get(name)
        if steps and steps * at_once != run.global_batch_size:
            batch = f"batch {run.global_batch_size} on {layout.dp} replicas x micro-batch {run.local_batch_size}"
            yield f"parallel.{name}", steps, f"{run.global_batch_size / at_once:.6g}, as of {batch}"
