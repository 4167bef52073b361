"""Warns of views of gathered parameters that are kept after the forward in which they were taken.

    forward    self.old = self.weight.detach()      a view of the slot that the unit was gathered into
    later      another unit is gathered there       self.old shows values of the other unit, without an error

Autograd keeps such views, too, which is right: a unit is gathered into its slot again before the backward reads them.
So a view alone is no error, and code that takes a new view in each forward reads correct values. The first passes, and
some later ones, check the attributes of all modules and warn of views that will show other values.

A script that appends views to a list of its own is noticed by the number of references to the slots, which grows from
pass to pass. Only then all objects of the process are searched, twice: views that are new in the second search and are
in a container belong to the script, since the engine makes its own views only once. Rejected: such a search in every
run, which takes longer than a step.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from zeroshard.errors import ZeroShardWarning
from zeroshard.sharding.shared_memory import kept_tensors

_LOOKS = 8
"""How often the references are counted: in the first passes, each of which may be followed by another plan."""
_SAMPLE = 4
"""How many new views are checked for a container; Python searches all objects for each."""
_CONTAINERS = (list, tuple, dict, set, deque)
_MEANS = (
    "of parameters that were gathered for a forward, kept after that forward. Other parameters use its memory later, "
    "whose values it will show. Use it in the same forward only, or keep a copy (weight.detach().clone())"
)


class KeptViews:
    """Checks between two passes the attributes of a model's modules, and whether anything else refers to the slots.

    Args:
        slots: the memory that units are gathered into, one after the other.

    Attributes:
        suspects: whether the next pass is to look too.
    """

    def __init__(self, model: nn.Module, slots: Sequence[torch.Tensor]) -> None:
        self._model = model
        self._warned: set[str] = set()
        self._looks_left = _LOOKS
        self.adopt(slots)

    def adopt(self, slots: Sequence[torch.Tensor]) -> None:
        """The slots are others from here on."""
        used = [slot for slot in slots if slot.nbytes]
        self._spans = [(slot.data_ptr(), slot.data_ptr() + slot.nbytes) for slot in used]
        self._slots = [weakref.ref(slot) for slot in used]  # their memory is the engine's to give back
        self._references: int | None = None
        self._known: set[int] | None = None
        self.suspects = False

    def look(self) -> None:
        """Warn of each view once."""
        if not self._slots:
            return
        kept = [member for member in kept_tensors(self._model) if self._lies_in_a_slot(member.span.start)]
        for member in kept:
            if member.name not in self._warned:
                self._warned.add(member.name)
                _warn(f"{member.name!r} is a view {_MEANS}")
        self.suspects = False
        if self._looks_left:
            self._looks_left -= 1
            self._search_containers({member.span.start for member in kept})

    def _search_containers(self, named: set[int]) -> None:
        """See whether anything refers to the slots that did not in the pass before, but for views at `named`."""
        before, self._references = self._references, _references(self._slots)
        known, self._known = self._known, None
        if known is not None:
            views = self._views()
            new = [each for each in views if id(each) not in known and each.data_ptr() not in named]
            sample = new[:_SAMPLE]
            held = next((each for each in sample if _is_contained(each, but=(views, new, sample))), None)
            if held is not None:
                self._looks_left = 0
                _warn(f"a list or the like of the script has views (one of shape {tuple(held.shape)}) {_MEANS}")
        elif before is not None and self._references > before:
            self._known = {id(view) for view in self._views()}
            self.suspects = True

    def _views(self) -> list[torch.Tensor]:
        """All plain tensors of the process that lie in the slots."""
        tensors = (each for each in gc.get_objects() if type(each) is torch.Tensor)
        return [each for each in tensors if _has_memory(each) and self._lies_in_a_slot(each.data_ptr())]

    def _lies_in_a_slot(self, address: int) -> bool:
        return any(low <= address < high for low, high in self._spans)


def _references(slots: Sequence[weakref.ref[torch.Tensor]]) -> int:
    alive = (slot for each in slots if (slot := each()) is not None)
    return sum(torch._C._storage_Use_Count(slot.untyped_storage()._cdata) for slot in alive)


def _has_memory(tensor: torch.Tensor) -> bool:
    wrapped = is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)
    return not wrapped and tensor.layout is torch.strided and not tensor.is_meta


def _is_contained(view: torch.Tensor, but: Sequence[object]) -> bool:
    """Whether a list, a dict or the like holds it; not what a graph that is still alive keeps for its backward."""
    referrers = (each for each in gc.get_referrers(view) if isinstance(each, _CONTAINERS))
    holders = [each for each in referrers if not any(each is other for other in but)]
    return any(
        not any(isinstance(owner, torch._C._FunctionBase) for owner in gc.get_referrers(each)) for each in holders
    )


def _warn(message: str) -> None:
    warnings.warn(message, ZeroShardWarning, stacklevel=3)
