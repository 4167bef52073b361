"""A group of weights that rest and travel as fp8 numbers, with scales for each parameter or block (`GroupPlan.shown`).

    master      float32, the part that this rank updates                      the truth
    shard       codes of this rank's part       made of the master weights after each write, when all ranks have told
    whole       codes of all                    the largest magnitude of each parameter (engine.core.scaled_weights)
    parameter   shows no values; its layer multiplies with the codes          (fp8.parameter, fp8.linear)

What reads the parameter beside its layer gets values that are decoded for it. Rejected: decoded values in the slot, of
which a gather's memory and a forward's casts would be twice and three times as large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.guard import sharded_gradient_of
from zeroshard.fp8.cast import decode
from zeroshard.fp8.parameter import Codes, coded_class, drop_codes, keep_codes
from zeroshard.sharding.resting import show_values, unguarded


@dataclass
class ScaledGroup(Group):
    """The tensors of such a group on this rank."""

    codes: list[Codes] = field(default_factory=list)
    """By parameter; none before `adopt_scales`."""
    _at: list[torch.Tensor] = field(default_factory=list)
    _codes_beside: torch.Tensor | None = None

    def adopt_scales(self, unscales: Sequence[torch.Tensor], readable: Callable[[], bool]) -> None:
        """Take what turns codes into values, float32, for each parameter."""
        segments = self.plan.layout.segments
        self.codes = [
            Codes(segment.name, self._codes_of(index), unscales[index], readable)
            for index, segment in enumerate(segments)
        ]
        for parameter, own, record in zip(self.parameters, self.classes, self.codes, strict=True):
            keep_codes(parameter, record)
            if type(parameter) is own:
                parameter.__class__ = coded_class(own)  # pyright: ignore[reportAttributeAccessIssue]

    def drop_all_codes(self) -> None:
        """Drop the codes of all parameters: the model is closed."""
        for parameter in self.parameters:
            drop_codes(parameter)

    def place_views(self) -> None:
        """See Group."""
        super().place_views()
        self._at = self.views
        self.views = list(self.empties)
        self.note_views()
        for index, record in enumerate(self.codes):
            record.codes = self._codes_of(index)

    def show(self) -> None:
        """See Group."""
        if self._beside is None:
            for index, (parameter, own) in enumerate(zip(self.parameters, self.classes, strict=True)):
                if index not in self.opened:
                    parameter.__class__ = own
                    parameter.data = self.empties[index]
                    parameter.__class__ = coded_class(own)  # pyright: ignore[reportAttributeAccessIssue]
            return
        self._decode_beside()
        super().show()

    def show_one(self, index: int) -> None:
        """See Group."""
        parameter = self.parameters[index]
        if self._beside is None:
            show_values(parameter, self.empties[index])
            if self.codes:
                parameter.__class__ = coded_class(self.classes[index])  # pyright: ignore[reportAttributeAccessIssue]
        else:
            super().show_one(index)

    def values(self, *, beside: bool) -> list[torch.Tensor]:
        """See Group; what shows no values can't be written on past its guard, so one element stands for it."""
        if beside and self._beside is not None:
            return self._beside
        return [empty.as_strided((1,), (1,)) for empty in self.empties]

    def allocate_beside(self) -> torch.Tensor:
        """See Group: extra memory for the codes, and for the values that `show` decodes from them."""
        layout = self.plan.layout
        values = torch.empty(layout.numel, dtype=self.dtype, device=self.device)
        self._beside = [self._in(values, index) for index in range(len(self.parameters))]
        self._codes_beside = torch.empty_like(self.whole)
        return self._codes_beside

    def free_beside(self) -> None:
        """See Group."""
        super().free_beside()
        self._codes_beside = None

    def _decode_beside(self) -> None:
        codes, self._codes_beside = self._codes_beside, None
        if codes is None or self._beside is None:
            return
        with torch.no_grad():
            for index, value in enumerate(self._beside):
                value.copy_(decode(self._in(codes, index), self.codes[index].unscale, self.dtype))

    def _codes_of(self, index: int) -> torch.Tensor:
        return self._at[index].data  # with a version counter of its own: gathers write past autograd

    def _placeholder(self, index: int) -> torch.Tensor:
        with unguarded():
            return sharded_gradient_of(self.empties[index].detach())
