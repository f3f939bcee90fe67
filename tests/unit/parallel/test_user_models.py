"""A user's model on one process: dropout that a resumed run repeats, buffers that are always filled, and what is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from phalanx.core.errors import PhalanxError
from phalanx.parallel import ParallelModel, SlotBatch, build_mesh
from phalanx.spec import Job, parse_job
from phalanx.trainer.optimizer import Optimizer

VOCAB_SIZE, SEQ_LEN, NUM_WINDOWS = 16, 8, 4


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    """A process group, and memory that is NaN until something fills it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    dist.destroy_process_group()


def _job(name: str, reduce: str = "float32") -> Job:
    return parse_job(
        {
            "job": {"name": "own", "storage": "memory://own"},
            "model": {"class": f"own_models:{name}", "args": {"vocab_size": VOCAB_SIZE}},
            "data": {"train": "memory://own/train"},
            "training": {"seq_len": SEQ_LEN, "steps": 4, "global_batch_size": NUM_WINDOWS}
            | {"mixed_precision_param": "float32", "mixed_precision_reduce": reduce},
            "optimizer": {"lr": 0.1},
        }
    )


def _built(job: Job, *, initialise: bool = True) -> ParallelModel:
    layout = job.layout(1)
    return ParallelModel(job, layout, build_mesh(layout, "cpu"), "cpu", initialise=initialise)


def _batch() -> tuple[SlotBatch, int]:
    shape = (NUM_WINDOWS, SEQ_LEN)
    drawn = torch.randint(0, VOCAB_SIZE, (2, *shape), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(SEQ_LEN).expand(shape)
    return SlotBatch(drawn[0], drawn[1], positions, torch.zeros(shape, dtype=torch.int64), NUM_WINDOWS), drawn[
        1
    ].numel()


def _train(model: ParallelModel, optimizer: Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        model.seed_step(step)
        losses.append(float(model.forward_backward(*_batch())))
        optimizer.update(model.gradients(), float(model.gradient_square_sum().sqrt()), 1.0)
        model.zero_gradients()
    return losses


@pytest.mark.parametrize("name", ["Dropping", "OwnWeights"])
def test_resumed_model_with_dropout_goes_on_bit_for_bit(name: str) -> None:
    job = _job(name)
    model = _built(job)
    optimizer = Optimizer(job, model.parameters())
    _train(model, optimizer, range(1, 3))
    saved = [held.local.clone() for held in (*model.parameters(), *optimizer.state())]
    expected = _train(model, optimizer, range(3, 5))

    torch.manual_seed(99)  # another process would stand elsewhere
    resumed = _built(job, initialise=False)
    its_optimizer = Optimizer(job, resumed.parameters())
    for held, tensor in zip((*resumed.parameters(), *its_optimizer.state()), saved, strict=True):
        held.local.copy_(tensor)
    its_optimizer.resume({"num_updates": 2})
    assert _train(resumed, its_optimizer, range(3, 5)) == expected
    for held, other in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(held.local, other.local), held.name


def test_steps_draw_different_dropout() -> None:
    model = _built(_job("Dropping"))
    losses = []
    for step in (1, 2):
        model.seed_step(step)
        losses.append(float(model.forward_backward(*_batch())))
    assert losses[0] != losses[1]


def test_evaluation_drops_nothing_and_leaves_training_as_it_was() -> None:
    model = _built(_job("Dropping"))
    kept = model.stages[0].get_submodule("layers.0.1")
    kept.eval()
    assert float(model.evaluate(*_batch())) == float(model.evaluate(*_batch()))
    assert model.stages[0].training
    assert model.stages[0].get_submodule("layers.1.1").training
    assert not kept.training


@pytest.mark.parametrize("initialise", [True, False])
@pytest.mark.parametrize("name", ["Dropping", "OwnWeights"])
def test_buffers_are_those_of_init_whether_weights_are_restored_or_not(name: str, initialise: bool) -> None:
    stage = _built(_job(name), initialise=initialise).stages[0]
    buffers = dict(stage.named_buffers())
    assert buffers.keys() == {"scale", "layers.0.scale", "layers.1.scale"}
    assert all(torch.equal(buffer, torch.full((8,), 0.5)) for buffer in buffers.values())


def test_persistent_buffer_is_refused_by_name() -> None:
    with pytest.raises(PhalanxError, match=r"Remembering, buffer layers\.0\.seen: .*persistent=False"):
        _built(_job("Remembering"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Scaled", r"Scaled, parameter gain .*shape \(\).*\[1\]"),
        ("Counting", r"parameter seen .*torch\.int64 of shape"),
        ("Lazy", r"parameter late\.weight: expected a shape that __init__ gives"),
        ("Masked", r"attribute mask is 'a Tensor': .*register_buffer"),
        ("Listed", r"attribute kept is 'a list': .*ModuleList"),
    ],
)
def test_part_that_ranks_could_not_share_or_make_real_is_refused_by_name(name: str, told: str) -> None:
    with pytest.raises(PhalanxError, match=told):
        _built(_job(name))


def test_weight_of_two_layers_is_refused_where_each_is_sharded_by_itself() -> None:
    with pytest.raises(
        PhalanxError, match=r"parameter layers\.0\.0\.weight: expected one that no two of `layers` share"
    ):
        _built(_job("Sharing", "bfloat16"))
    _built(_job("Sharing")).forward_backward(*_batch())


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_layer_that_is_there_twice_and_lists_of_known_modules_train(reduce: str) -> None:
    assert float(_built(_job("Known", reduce)).forward_backward(*_batch())) > 0


def test_buffer_that_depends_on_a_parameter_is_refused_by_name() -> None:
    with pytest.raises(PhalanxError, match=r"buffer first: .*not from parameters"):
        _built(_job("Derived"))


def test_gradient_of_an_idle_parameter_is_zero_and_of_a_frozen_one_none() -> None:
    model = _built(_job("Partial"))
    model.forward_backward(*_batch())
    gradients = dict(zip((held.name for held in model.parameters()), model.gradients(), strict=True))
    assert gradients["frozen"] is None
    idle = gradients["idle"]
    assert idle is not None
    assert torch.equal(idle, torch.zeros(3, 3))
    assert all(gradient is not None for name, gradient in gradients.items() if name != "frozen")
