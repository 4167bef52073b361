"""A loader that gives each rank its part of the batches of all ranks of a sequence.

    rank 0 reads batch a, rank 1 batch b        rank 0 gets   first half of a   first half of b
                                                rank 1 gets   second half of a  second half of b

So a loader that divides its data over all ranks, as accelerate's does, is right as it is, and each step is so many
micro-batches of whole sequences. Labels are moved by one token before the cut, since the last token of a part is
followed by the first of the next. Rejected: slices sent by the rank that reads; numbers of tokens are small, and one
message to all is simpler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from zeroshard.engine.loader import EpochSampler
from zeroshard.errors import UsageError
from zeroshard.parallel.batch_message import gather_batches
from zeroshard.parallel.numbered_parts import NumberedParts, Numbers, first_of

IGNORED = -100
"""The label of a token that has none, which losses leave out."""
_SEQUENCES = ("input_ids", "inputs_embeds", "labels")


class SequenceLoader:
    """Batches of `loader`, a part of each sequence for each rank of `group`; all its ranks read it together.

    Its dataset, samplers and workers are those of a DataLoader that would give the same parts; what else is asked of it
    is answered by `loader`.

    Args:
        loader: gives a mapping with `input_ids`; of other data on each rank, or of the same from `deepspeed_io`.
        rank: which part this rank gets.
        device: for the tensors that are given.
    """

    def __init__(self, loader: Iterable[Any], rank: int, group: dist.ProcessGroup, device: Any) -> None:
        self.loader = loader
        self._rank, self._group, self._device = rank, group, device
        self.dataset = NumberedParts(self)
        self.sampler = self.batch_sampler = Numbers(self.dataset)
        self.collate_fn = first_of
        self.num_workers, self.prefetch_factor, self.persistent_workers = 0, None, False

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that is being made has nothing yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader) * (1 if self._reads_same() else self._group.size())  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        same = self._reads_same()
        source = iter(self.loader)
        while True:
            own = next(source, None)
            batches = [own] if same else gather_batches(own, self._group)
            found = [batch for batch in batches if batch is not None]
            if not found:
                return
            ended = self._holds_back_the_end()
            for number, batch in enumerate(found):
                if ended and number == len(found) - 1:
                    vars(self.loader)["end_of_dataloader"] = True
                yield self._part(batch)

    def _reads_same(self) -> bool:
        """Whether all ranks of a sequence read the same, as they do from the engine's own loaders."""
        sampler = getattr(self.loader, "sampler", None)
        return isinstance(sampler, EpochSampler) and sampler.num_replicas * self._group.size() == dist.get_world_size()

    def _holds_back_the_end(self) -> bool:
        """accelerate's loaders say with their last batch that it is the last; several parts are still to be given."""
        ended = vars(self.loader).get("end_of_dataloader") is True
        if ended:
            vars(self.loader)["end_of_dataloader"] = False
        return ended

    def _part(self, batch: Any) -> dict[str, Any]:
        return part_of_batch(batch, self._rank, self._group.size(), self._device)


def part_of_batch(batch: Any, rank: int, ranks: int, device: Any = None) -> dict[str, Any]:
    """A rank's part of a batch of sequences, with `position_ids` and, in place of `labels`, `shift_labels`.

    A length that the ranks don't divide is padded: with positions of a document of its own in a packed batch, else with
    an `attention_mask`.

    Raises:
        UsageError: the batch is no mapping with sequences.
    """
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"a batch of divided sequences is a mapping with input_ids, not a {type(batch).__name__}; let the loader's "
            "collate_fn make one"
        )
    values = dict(batch)
    of = next((values[name] for name in _SEQUENCES if isinstance(values.get(name), torch.Tensor)), None)
    if of is None or of.dim() < 2:
        raise UsageError(
            f"a batch of divided sequences needs input_ids of shape (samples, tokens); it has {sorted(values)}"
        )
    samples, tokens = of.shape[0], of.shape[1]
    if values.get("position_ids") is None:
        values["position_ids"] = torch.arange(tokens, device=of.device).expand(samples, -1)
    labels = values.pop("labels", None)
    if labels is not None and "shift_labels" not in values:
        values["shift_labels"] = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    values = _padded(values, samples, tokens, -tokens % ranks)
    length = (tokens + -tokens % ranks) // ranks
    return {name: _cut(name, value, length * ranks, rank, length, device) for name, value in values.items()}


def _padded(values: dict[str, Any], samples: int, tokens: int, missing: int) -> dict[str, Any]:
    if not missing:
        return values
    positions = values["position_ids"]
    goes_on = bool((torch.diff(positions, dim=-1) == 1).all())
    if goes_on and values.get("attention_mask") is None:
        values["attention_mask"] = torch.ones(samples, tokens, dtype=torch.int64, device=positions.device)
    fill = {"shift_labels": IGNORED}
    padded = {name: _longer(value, tokens, missing, fill.get(name, 0)) for name, value in values.items()}
    own = torch.arange(missing, device=positions.device) + (positions[..., -1:] + 1 if goes_on else 0)
    padded["position_ids"] = torch.cat([positions, own.expand(*positions.shape[:-1], missing)], dim=-1)
    return padded


def _longer(value: Any, tokens: int, missing: int, fill: int) -> Any:
    dim = _sequence_dim(value, tokens)
    if dim is None:
        return value
    return F.pad(value, (0, 0) * (value.dim() - 1 - dim) + (0, missing), value=fill)


def _cut(name: str, value: Any, tokens: int, rank: int, length: int, device: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 4 and value.shape[-1] == value.shape[-2]:
        raise UsageError(
            f"{name} of shape {tuple(value.shape)}: a mask for each pair of tokens can't be cut; give one of "
            "padding, or position_ids that begin each document at 0"
        )
    dim = _sequence_dim(value, tokens)
    part = value if dim is None else value.narrow(dim, rank * length, length).contiguous()
    return part if device is None else part.to(device)


def _sequence_dim(value: Any, tokens: int) -> int | None:
    """The dim of tokens: the second, or the last where each sample has several rows; None where there is none."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    return next((dim for dim in (1, value.dim() - 1) if value.shape[dim] == tokens), None)
