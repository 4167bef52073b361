"""Forwards that differentiate in their middle (forces, penalties, inner loops) train as unsharded ones do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import WIDTH, Batch, Task, square_loss
from tests.support.training import (
    Setting,
    assert_close,
    assert_same,
    build,
    full_parameters,
    sgd,
    shard_task,
    shared_reference,
    train_sharded,
)
from tests.support.zoo import Stack
from zeroshard.engine.core.handle import handle_of
from zeroshard.errors import UsageError

STAGES = (0, 1, 2, 3)


class Smooth(nn.Module):
    """A block whose second derivatives are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Energy(nn.Module):
    """Blocks between two Linears that give one number a row.

    Args:
        reentrant: how to checkpoint the blocks; None: not at all.
    """

    create_graph = False

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([self.block() for _ in range(4)])
        self.outer = nn.Linear(WIDTH, 1)

    def block(self) -> nn.Module:
        return Smooth()

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.outer(x)

    def slope(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The energy, and its gradient by the input."""
        energy = self.energy(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, retain_graph=True, create_graph=self.create_graph)
        return energy, slope

    def forward(self, x: torch.Tensor) -> object:
        return self.slope(x.requires_grad_())


class TrainedForces(Energy):
    """Forces are in the loss, which is a double backward."""

    create_graph = True


class ForcesAlone(TrainedForces):
    """Returns nothing but forces."""

    def forward(self, x: torch.Tensor) -> object:
        return self.slope(x.requires_grad_())[1]


class Descends(Energy):
    """Three steps down its own slope before the energy."""

    def forward(self, x: torch.Tensor) -> object:
        for _ in range(3):
            x = x.requires_grad_()
            x = x - 0.1 * self.slope(x)[1]
        return self.energy(x), x


class DescendsThrough(Descends):
    """The same, and the loss sees how the steps came about."""

    create_graph = True


class ByTransform(Energy):
    """Slopes by torch.func and torch.autograd.functional, which always build the graph of what they do."""

    def forward(self, x: torch.Tensor) -> object:
        energy, pull = torch.func.vjp(self.energy, x)
        slope = torch.func.grad(lambda where: self.energy(where).sum())(x)
        _, along = torch.autograd.functional.jvp(self.energy, x, torch.ones_like(x))
        return energy, pull(torch.ones_like(energy))[0], slope, along


class Laplacian(Energy):
    """Second derivatives of what it gives, as in a differential equation's residual."""

    create_graph = True

    def forward(self, x: torch.Tensor) -> object:
        energy, slope = self.slope(x.requires_grad_())
        (second,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        return energy + second.sum(dim=1, keepdim=True)


class BetweenBlocks(Energy):
    """Differentiates after each block, down to the input and to the block before, and goes on with what it found."""

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x))
        for block in self.blocks:
            after = block(hidden)
            (by_input,) = torch.autograd.grad(after.square().sum(), x, retain_graph=True)
            (by_hidden,) = torch.autograd.grad(after.square().sum(), hidden, retain_graph=True)
            hidden = after + 0.1 * torch.tanh(by_input + by_hidden)
        return self.outer(hidden)


class ByParameters(Energy):
    """Looks at the gradients of its own parameters."""

    def forward(self, x: torch.Tensor) -> object:
        energy = self.energy(x)
        gradients = torch.autograd.grad(energy.sum(), list(self.parameters()), retain_graph=True)
        shapes = [gradient.shape for gradient in gradients]
        assert shapes[:2] == [(WIDTH, WIDTH), (WIDTH,)], shapes
        return energy * torch.stack([gradient.norm() for gradient in gradients]).mean()


class Hamiltonian(Smooth):
    """A block that is the gradient of a potential by its input."""

    detach = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            where = x.detach().requires_grad_() if self.detach or not x.requires_grad else x
            potential = torch.tanh(self.down(torch.tanh(self.up(where)))).sum()
            (slope,) = torch.autograd.grad(potential, where, create_graph=True)
        return x - 0.5 * slope


class DetachedHamiltonian(Hamiltonian):
    """The same on a leaf of its own."""

    detach = True


class Flow(Energy):
    """Differentiates in its blocks' own forwards."""

    def block(self) -> nn.Module:
        return Hamiltonian()

    def forward(self, x: torch.Tensor) -> object:
        return self.energy(x)


class DetachedFlow(Flow):
    def block(self) -> nn.Module:
        return DetachedHamiltonian()


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Of all that the model returns."""
    output = model(batch.normal(3, WIDTH))
    parts = output if isinstance(output, tuple) else (output,)
    return sum((part.square().mean() for part in parts), torch.zeros(()))


ANYWHERE: dict[str, Callable[[], nn.Module]] = {
    "slope": Energy,
    "descends": Descends,
    "between blocks": BetweenBlocks,
    "by parameters": ByParameters,
    "in blocks": Flow,
    "in blocks, detached": DetachedFlow,
    "slope, recomputed": partial(Energy, False),
    "in blocks, recomputed": partial(Flow, False),
    "in blocks, detached and recomputed": partial(DetachedFlow, False),
    "in blocks, detached and recomputed by a reentrant checkpoint": partial(DetachedFlow, True),
}
DOUBLE: dict[str, Callable[[], nn.Module]] = {
    "forces": TrainedForces,
    "forces alone": ForcesAlone,
    "descends": DescendsThrough,
    "second derivatives": Laplacian,
    "transforms": ByTransform,
    "forces, recomputed": partial(TrainedForces, False),
}


def _trains(rank: int, world: int, make: Callable[[], nn.Module], stages: tuple[int, ...]) -> None:
    task = Task(make, loss)
    for setting in (Setting(steps=2), Setting(steps=2, micro=2, no_sync=True)):
        reference = shared_reference(task, setting, world)
        for stage in stages:
            what = f"stage {stage}, {setting.micro} micro-batches, no_sync {setting.no_sync}"
            outcome = train_sharded(task, setting.at(stage), rank)
            assert_close(outcome.parameters, reference.parameters, what=what)
            if setting.micro == 1:
                assert_same(outcome.parameters, reference.parameters, what)


@pytest.mark.parametrize("name", ANYWHERE)
def test_a_gradient_inside_of_a_forward_trains_as_unsharded(name: str) -> None:
    run_ranks(2, _trains, ANYWHERE[name], STAGES)


@pytest.mark.parametrize("name", DOUBLE)
def test_a_gradient_of_such_a_gradient_trains_as_unsharded_on_whole_parameters(name: str) -> None:
    run_ranks(2, _trains, DOUBLE[name], STAGES[:3])


def _refused_and_cured(rank: int, world: int) -> None:
    model, optimizer = shard_task(Task(TrainedForces, loss), Setting())
    with pytest.raises(
        UsageError, match=r"create_graph=True .* through unit 'blocks.3' .*use stage 2, or keep the units"
    ):
        loss(model, Batch(0, 0, rank))
    model.create_graph = False
    loss(model, Batch(0, 0, rank)).backward()
    optimizer.step()
    whole = zeroshard.Recipe(overrides={f"blocks.{index}": zeroshard.STAGES[2] for index in range(4)})
    for cure in (Setting(steps=2, plan=2), Setting(steps=2, plan=whole), Setting(steps=2, units=())):
        _trains_with(rank, world, Task(TrainedForces, loss), cure)


class ByGradAlone(Energy):
    def forward(self, x: torch.Tensor) -> object:
        return torch.func.grad(lambda where: self.energy(where).sum())(x)


class ByTangents(Energy):
    def forward(self, x: torch.Tensor) -> object:
        return torch.func.jvp(self.energy, (x,), (torch.ones_like(x),))[1]


class ByRows(Energy):
    def forward(self, x: torch.Tensor) -> object:
        return torch.func.vmap(self.energy)(x)


def _transforms(rank: int, world: int) -> None:
    for make in (ByGradAlone, ByTangents, ByRows):
        model, _ = shard_task(Task(make, loss), Setting(plan=3))
        x = Batch(0, 0, rank).normal(3, WIDTH)
        with pytest.raises(UsageError, match=r"a transform of torch\.func .* whose parameters are sharded"):
            model(x)
        if make is not ByGradAlone:  # nothing is derived from the parameters' values
            with torch.no_grad():
                assert_same({"": model(x)}, {"": build(Task(make, loss))(x)})


def test_a_transform_inside_of_a_forward_through_sharded_units_is_refused() -> None:
    run_ranks(2, _transforms)


def _trains_with(rank: int, world: int, task: Task, setting: Setting) -> None:
    reference = shared_reference(task, setting, world)
    assert_same(train_sharded(task, setting, rank).parameters, reference.parameters, str(setting))


def test_a_gradient_of_a_gradient_through_sharded_units_is_refused_and_each_cure_that_is_named_works() -> None:
    run_ranks(2, _refused_and_cured)


class CallsBackward(Energy):
    """Calls backward() where only torch.autograd.grad may be."""

    def forward(self, x: torch.Tensor) -> object:
        energy = self.energy(x)
        energy.sum().backward(retain_graph=True)
        return energy


def _backward_inside(rank: int, world: int) -> None:
    for stage in STAGES:
        model, _ = shard_task(Task(CallsBackward, loss), Setting(plan=stage))
        with pytest.raises(UsageError, match=r"backward\(\) was called inside of the model's forward"):
            model(Batch(0, 0, rank).normal(3, WIDTH))


def test_a_backward_that_leaves_gradients_inside_of_a_forward_is_refused() -> None:
    run_ranks(2, _backward_inside)


def penalty_alone(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Nothing but the gradient of the input's gradient, taken outside of the forward."""
    assert isinstance(model, Energy)
    x = batch.normal(3, WIDTH).requires_grad_()
    (slope,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
    return slope.square().sum()


def by_outputs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Weighs two losses by their gradients by the model's output, as in balanced training of several tasks."""
    energy, _ = model(batch.normal(3, WIDTH))
    losses = energy.square().mean(), energy.exp().mean()
    slopes = [torch.autograd.grad(one, energy, retain_graph=True)[0].norm() for one in losses]
    return losses[0] * slopes[1] + losses[1] * slopes[0]


def kept_by_input(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Weighs its loss by a gradient that a backward left on the input alone."""
    x = batch.normal(3, WIDTH).requires_grad_()
    energy, _ = model(x)
    energy.square().mean().backward(inputs=[x], retain_graph=True)
    assert x.grad is not None
    return energy.exp().mean() * x.grad.norm()


@pytest.mark.parametrize(
    ("flow", "stages"), [(penalty_alone, STAGES[:3]), (by_outputs, STAGES), (kept_by_input, STAGES)]
)
def test_gradients_taken_outside_of_a_forward_train_as_unsharded(
    flow: Callable[[nn.Module, Batch], torch.Tensor], stages: tuple[int, ...]
) -> None:
    run_ranks(2, _flows, flow, stages)


def _flows(rank: int, world: int, flow: Callable[[nn.Module, Batch], torch.Tensor], stages: tuple[int, ...]) -> None:
    for stage in stages:
        _trains_with(rank, world, Task(Energy, flow), Setting(steps=2, plan=stage))


def _by_inputs(model: nn.Module, batch: Batch) -> None:
    """Leaves gradients on some parameters alone."""
    chosen = [value for name, value in model.named_parameters() if "blocks.0" not in name]
    loss(model, batch).backward(inputs=chosen)


def _by_nodes(model: nn.Module, batch: Batch) -> None:
    edges = [torch.autograd.graph.get_gradient_edge(value) for value in model.parameters()]
    torch.autograd.backward(loss(model, batch), inputs=edges)


def _with_graph(model: nn.Module, batch: Batch) -> None:
    loss(model, batch).backward(create_graph=True)


BACKWARDS = {"inputs": (_by_inputs, STAGES), "nodes": (_by_nodes, STAGES), "a graph": (_with_graph, STAGES[:3])}


def _other_backwards(rank: int, world: int) -> None:
    for name, (backward, stages) in BACKWARDS.items():
        task = Task(Energy, loss)
        plain = build(task)
        reference = sgd(plain)
        for step in range(2):
            backward(plain, Batch(step, 0, 0))
            reference.step()
            reference.zero_grad()
        for stage in stages:
            model, optimizer = shard_task(task, Setting(plan=stage, optimizer=sgd))
            for step in range(2):
                backward(model, Batch(step, 0, 0))
                optimizer.step()
                optimizer.zero_grad()
            assert_same(full_parameters(model), dict(plain.named_parameters()), f"{name}, stage {stage}")


def test_a_backward_by_inputs_or_with_a_graph_trains_as_unsharded() -> None:
    run_ranks(2, _other_backwards)


class Evaluated(Energy):
    """Needs its slope in an evaluation, too."""

    def forward(self, x: torch.Tensor) -> object:
        with torch.enable_grad():
            energy, slope = self.slope(x.requires_grad_())
        return energy, slope


def _evaluates(rank: int, world: int) -> None:
    expected = shared_reference(Task(Evaluated, loss), Setting(steps=2), world).parameters
    for stage in STAGES:
        model, optimizer = shard_task(Task(Evaluated, loss), Setting(plan=stage))
        for step in range(2):
            plain = build(Task(Evaluated, loss))
            plain.load_state_dict({name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)})
            for _ in range(2):
                x = Batch(step, 1, rank).normal(3, WIDTH)
                with torch.no_grad():
                    assert all(torch.equal(a, b) for a, b in zip(model(x), plain(x.clone()), strict=True))
            loss(model, Batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_parameters(model), expected, f"stage {stage}")


def test_an_evaluation_may_differentiate_by_its_input() -> None:
    run_ranks(2, _evaluates)


def _differentiates_a_whole_pass(rank: int, world: int) -> None:
    model, optimizer = shard_task(Task(Stack, square_loss), Setting(plan=3))
    handle = handle_of(model)
    for step in range(3):
        x = Batch(step, 0, rank).normal(3, WIDTH).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        assert not any(unit.gathered_beside for unit in handle.runtime.units)
        square_loss(model, Batch(step, 1, rank)).backward()
        assert not any(unit.gathered_beside for unit in handle.runtime.units)
        optimizer.step()
        optimizer.zero_grad()
    assert handle.plan.kept == ()


def test_a_gradient_of_a_whole_pass_by_its_input_keeps_no_unit_gathered() -> None:
    """The question whether a backward leaves gradients was itself taken for a read of every parameter."""
    run_ranks(2, _differentiates_a_whole_pass)
