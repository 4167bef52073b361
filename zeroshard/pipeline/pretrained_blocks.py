"""A transformers model as the blocks of a vertical schedule, by the plan of pipeline stages that it brings.

    front     the model's own forward to its layers: embedding, masks, positions; what each layer is given is noted
    layers    called as the model would call them, one block each
    tail      the model's own forward after its layers: norm, head

In front and tail what they do not run is out of the way for the time of the call. Parameters keep their names, and the
model itself runs as before. Rejected: a list of layers, norm and head alone, to which masks and positions, and what a
model does to its logits, would have to be taught for each architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zeroshard.errors import PlanError
from zeroshard.pipeline.pretrained import CLOSE, Absent, find_parts

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]
Value = tuple[torch.Tensor, Calls, dict[str, Any]]
"""The hidden state, what each layer is given besides it, and the model's other arguments."""


def pretrained_blocks(model: nn.Module, *, check: bool = True) -> list[nn.Module]:
    """The blocks of a causal language model of transformers, for `VerticalSchedule(blocks=...)`.

    The first one takes token ids, or a dict of the model's arguments; the last one gives logits.

    Args:
        check: compute a few tokens with the whole and with its blocks, where it has values: before it is sharded.

    Raises:
        PlanError: the model brings no plan of stages, or is not what its blocks make of it.
    """
    layers, first, last = find_parts(model)
    blocks = [_Front(model, layers, first, last), *_layers(model, layers), _Tail(model, layers, last)]
    if check and all(parameter.numel() and not parameter.is_meta for parameter in model.parameters()):
        _compare(model, blocks)
    return blocks


class _Noting(Absent):
    """In the place of a layer: notes what it is given, and hands the hidden state on."""

    def __init__(self, of: nn.Module, calls: Calls) -> None:
        super().__init__(of)
        self._calls = calls

    def forward(self, given: Any = None, *args: Any, **named: Any) -> Any:
        """The hidden state as it came."""
        if given is None:
            given = named.pop(next(iter(named)))
        self._calls.append((args, named))
        return given


class _Front(nn.Module):
    def __init__(self, model: nn.Module, layers: list[str], first: list[str], last: list[str]) -> None:
        super().__init__()
        self._model = (model,)  # not a child: only what it runs counts as its own
        self._layers, self._last = layers, last
        self.own = nn.ModuleList(model.get_submodule(path) for path in first)

    def forward(self, batch: Any) -> Value:
        """What the first layer is given."""
        (model,) = self._model
        named = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        ids, calls = named.pop("input_ids"), Calls()
        noting = {path: _Noting(model.get_submodule(path), calls) for path in self._layers}
        inside = [path for path in self._last if path.startswith(f"{model.base_model_prefix}.")]
        with _replaced(model, {**noting, **{path: Absent(model.get_submodule(path)) for path in inside}}):
            base: Any = model.base_model
            hidden = base(input_ids=ids, use_cache=False, **named).last_hidden_state
        return hidden, calls, named


class _Layer(nn.Module):
    def __init__(self, layer: nn.Module, number: int) -> None:
        super().__init__()
        self.layer, self._number = layer, number

    def forward(self, value: Value) -> Value:
        """The layer's output in the place of its input."""
        hidden, calls, named = value
        args, keywords = calls[self._number]
        output = self.layer(hidden, *args, **keywords)
        return output[0] if isinstance(output, tuple) else output, calls, named


class _Tail(nn.Module):
    def __init__(self, model: nn.Module, layers: list[str], last: list[str]) -> None:
        super().__init__()
        self._model, self._layers = (model,), layers
        self.own = nn.ModuleList(model.get_submodule(path) for path in last)

    def forward(self, value: Value) -> torch.Tensor:
        """Logits."""
        (model,) = self._model
        hidden, _, named = value
        with _replaced(model, {path: Absent(model.get_submodule(path)) for path in self._layers}):
            return type(model).forward(model, inputs_embeds=hidden, use_cache=False, **named).logits


def _layers(model: nn.Module, paths: list[str]) -> list[nn.Module]:
    return [_Layer(model.get_submodule(path), number) for number, path in enumerate(paths)]


@contextmanager
def _replaced(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Have other modules in some places for a while."""
    before = {path: model.get_submodule(path) for path in modules}
    try:
        for path, module in modules.items():
            model.set_submodule(path, module)
        yield
    finally:
        for path, module in before.items():
            model.set_submodule(path, module)


def _compare(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Raises PlanError where the blocks one after the other give something else than the whole model."""
    training = model.training
    model.eval()
    ids = torch.arange(4, device=next(model.parameters()).device).unsqueeze(0)
    whole: Any = model
    with torch.no_grad():
        wanted: torch.Tensor = whole(input_ids=ids, use_cache=False).logits
        value: Any = ids
        for block in blocks:
            value = block(value)
    model.train(training)
    far = float((value.float() - wanted.float()).abs().max())
    if not far <= CLOSE * float(wanted.float().abs().max()):
        raise PlanError(
            f"{type(model).__name__}: its blocks one after the other give logits that differ from the whole model's by "
            f"{far:.3g}: its forward computes more between its layers than its plan says; write it as a PipelineModule"
        )
