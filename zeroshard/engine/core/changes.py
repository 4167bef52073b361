"""Finds writes to parameters that their version counters do not show, by comparing values in some passes and steps.

    gathered       at use        take fingerprints of the unit's parameters
                   at release    take them again; if they differ the change would be lost, so it is refused
    resting whole  at a step     compare parameters with their rounded master weights; if they differ, update these
                                 (where master weights rest off the device, fingerprints first)

`with torch.no_grad(): self.weight.clamp_()` increments the parameter's version, which every step checks (see
inspection). `self.weight.data.clamp_()` does not, nor does a write through a NumPy array or a custom kernel. So the
first passes compare values, with gradients and without, and in the recomputation of their backward. They find code that
writes in every pass; the 100th, 1000th and 10000th pass find code that begins to write later. All other passes launch
no kernel for this check, unless `always` is set (`enable_sanity_checks` in a config). Parameters that rest whole
without master weights are not checked: the step updates the values that it finds. On a GPU the host reads the result
two passes later (see delayed_reads), or at a drain, so that no step waits for the device. Rejected: a class of its own
for parameters in use, which watches `data`. torch.compile treats every operation on such a parameter as overridden.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from zeroshard.engine.core.autograd import transforming
from zeroshard.engine.core.delayed_reads import DELAY, DelayedReads, on_host
from zeroshard.engine.core.inspection import refuse_written
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.rank_values import is_split, read_values, update_master_weights
from zeroshard.engine.memory.unit import Unit
from zeroshard.engine.memory.update_view import update_param
from zeroshard.errors import ZeroShardWarning
from zeroshard.sharding.fingerprint import Fingerprints

FIRST_NUMBERS = 3
"""How many passes of each kind, and how many steps, are checked at the start."""
LATER_NUMBERS = frozenset({100, 1000, 10_000, 100_000, 1_000_000})
"""Numbers of later passes and steps that are checked, to find code that began to write after the first ones."""


def _looked_at(number: int, first: int = FIRST_NUMBERS) -> bool:
    return number <= first or number in LATER_NUMBERS


class ForwardChanges:
    """Compares the values of gathered parameters at their use and at their release.

    Attributes:
        active: whether units that come into use in this pass are checked.
        always: whether every pass is checked.
        expected: fingerprints of the checked units in use, by unit and whether it is held (see Group).
    """

    def __init__(self, device: torch.device) -> None:
        self.active = self.always = False
        self.expected: dict[tuple[int, bool], torch.Tensor] = {}
        self._fingerprints = Fingerprints(device)
        self._on_gpu = device.type == "cuda"
        self._passes = {True: 0, False: 0}
        self._reads: DelayedReads[Unit] = DelayedReads()

    def begin_pass(self) -> None:
        """A forward of the model begins. Raises UsageError if an earlier pass was found to have written."""
        self.active = False
        if self._on_gpu:
            if torch.cuda.is_current_stream_capturing():
                return
            self._reads.next_pass()
            self.report(all_of_them=False)
        kind = torch.is_grad_enabled()
        self._passes[kind] += 1
        self.active = self.always or _looked_at(self._passes[kind])

    def record(self, unit: Unit, *, beside: bool) -> None:
        """Take the fingerprints of a unit whose parameters have just got their values."""
        if transforming():  # vmap would transform the operations of a fingerprint, too
            return
        self.expected[unit.index, beside] = self._fingerprints_of(unit, beside)

    def compare(self, unit: Unit, *, beside: bool) -> None:
        """The unit is about to be released. Raises UsageError if its parameters have been written."""
        before = self.expected.pop((unit.index, beside), None)
        if before is None:
            return
        different = self._fingerprints_of(unit, beside) != before
        if not self.expected:
            self._fingerprints.free_memory()
        if self._on_gpu:
            self._reads.start(unit, different)
        else:
            _refuse(unit, different)

    def report(self, *, all_of_them: bool = True) -> None:
        """Raise UsageError for a write that was found so far; with `all_of_them` the host waits for the device."""
        for unit, different in self._reads.ready(all_of_them=all_of_them):
            _refuse(unit, different)

    def forget(self) -> None:
        """Discard the fingerprints: the units were released without a comparison, or the shards were written."""
        if self.expected:
            self.expected.clear()
            self._fingerprints.free_memory()

    def _fingerprints_of(self, unit: Unit, beside: bool) -> torch.Tensor:
        return self._fingerprints.of(value for group in unit.groups for value in group.values(beside=beside))


def _refuse(unit: Unit, different: torch.Tensor) -> None:
    found = different.tolist()
    if True in found:
        refuse_written(unit, found.index(True))


class WholeChanges:
    """Updates master weights from parameters that rest whole and were written, in the steps that are checked.

    All steps are checked once a write was found, or if `always` is set. Master weights off the device would take long
    to read: the step before a checked one takes fingerprints of these parameters, and only where they have changed are
    the master weights read.
    """

    def __init__(self, units: Iterable[Unit], device: torch.device) -> None:
        self._groups = [group for unit in units for group in unit.trainable if _can_differ(group)]
        self._off_device = [group for group in self._groups if group.plan.updated_off_device]
        self._fingerprints = Fingerprints(device)
        self._recorded: torch.Tensor | None = None
        self._on_gpu = device.type == "cuda"
        self._steps = 0
        self._found = self.always = False
        self._reads: DelayedReads[None] = DelayedReads()

    def record_next(self) -> bool:
        """Whether `record` has to be called before other code can write parameters: the next step is checked."""
        self._recorded = None
        return bool(self._off_device) and self._is_checked(self._steps + 1)

    def record(self) -> None:
        """Take fingerprints of parameters that rest whole and have just got their values, for the next step."""
        self._recorded = self._fingerprints_off_device()

    @property
    def next_is_checked(self) -> bool:
        """Whether the next step will look for writes, which a save before it has to keep, too."""
        return self._may_look() and self._is_checked(self._steps + 1)

    def _may_look(self) -> bool:
        return bool(self._groups) and not (self._on_gpu and torch.cuda.is_current_stream_capturing())

    def due(self) -> bool:
        """Whether the step that begins is checked."""
        if not self._may_look():
            return False
        self._reads.next_pass()
        for _, differs in self._reads.ready():
            if bool(differs):
                self._note_change()
        self._steps += 1
        return self._is_checked(self._steps)

    def _is_checked(self, step: int) -> bool:
        # A write in one of the first steps is known only some steps later; until then every step has to apply it.
        return self._found or self.always or _looked_at(step, FIRST_NUMBERS + (DELAY if self._on_gpu else 0))

    def _note_change(self) -> None:
        if not (self._found or self.always) and self._steps > FIRST_NUMBERS + DELAY:
            warnings.warn(
                f"step {self._steps} found parameters that were written without a change of their version counters "
                "(for example by parameter.data.clamp_(...)). From this step on such changes are kept; changes that "
                f"began after step {FIRST_NUMBERS} were undone by the steps in between. Write under torch.no_grad() "
                "instead",
                ZeroShardWarning,
                stacklevel=2,
            )
        self._found = True

    def update_master_weights(self) -> None:
        """Update master weights from changed parameters; at the begin of a step, while nothing is in flight."""
        unchanged = self._unchanged_off_device()
        for group in self._groups:
            if id(group) in unchanged:
                continue
            differs = _differs(group)
            if differs.is_cuda and not group.plan.updated_off_device:
                self._reads.start(None, differs)  # updating costs less than waiting for the comparison
            elif bool(on_host(differs)):
                self._note_change()
            else:
                continue
            for index, holder in enumerate(group.holders):
                update_master_weights(group, index, holder.detach())

    def _unchanged_off_device(self) -> frozenset[int]:
        """By id, the groups whose master weights need not be read, since their parameters are as recorded."""
        if self._recorded is None:
            return frozenset()
        same = on_host(self._fingerprints_off_device() == self._recorded).tolist()
        return frozenset(id(group) for group, unchanged in zip(self._off_device, same, strict=True) if unchanged)

    def _fingerprints_off_device(self) -> torch.Tensor:
        found = self._fingerprints.of(map(update_param, self._off_device))
        self._fingerprints.free_memory()
        return found


def _can_differ(group: Group) -> bool:
    plan = group.plan
    return not plan.param.divided and group.master is not None and not is_split(group) and not plan.scaled


@torch.no_grad()
def _differs(group: Group) -> torch.Tensor:
    values = update_param(group).to(group.device)
    rounded = read_values(group, device=group.device).to(values.dtype)
    return ((values != rounded) & ~(values.isnan() & rounded.isnan())).any()
