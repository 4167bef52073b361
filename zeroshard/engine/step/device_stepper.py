"""A step during which the host does not wait: norm, clipping, overflow check and loss scale stay on the device.

    finish gradients -> squares -> small all-reduce -> [ok, norm, coefficient] -> table of scalars -> update per unit
                                                            |
                                                            +--> outcome -> pinned memory, read at the next step

The host reads the outcome of step n when step n+1 begins, or when it is asked for. The device does not apply a step
with inf or NaN in its gradients, and changes the loss scale itself. Units are updated in the order in which the next
forward gathers them, and each gather waits only for the update of its own unit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroshard.engine.core.handle import Handle
from zeroshard.engine.core.statistics import digest_terms
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.update_view import own_pieces
from zeroshard.engine.step.step_base import StepperBase, regions_of_units
from zeroshard.errors import UsageError
from zeroshard.optim.kernels.norm import FINITE, SquaredNorm
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.updates import DeviceUpdate
from zeroshard.plan.traffic import STATS_FIXED, stats_numel

IN_FLIGHT = 2
"""How many steps there may be whose outcome the host has not read."""
FLAGS_KEPT = 64
_HOST_TILES = 2**40
"""Tiles of gradients in host memory get numbers from here on; each group has a range of this size."""


class DeviceStepper(StepperBase):
    """Runs steps on a GPU with an optimizer that needs no host.

    Attributes:
        captured_digest: digest of this rank's operations up to the step that was captured last.
    """

    def __init__(self, handle: Handle, update: DeviceUpdate, scaler: LossScaler | None) -> None:
        super().__init__(handle, update, scaler)
        device = handle.device
        self._update_method = update
        self._regions = regions_of_units(handle.runtime)
        self._stats = torch.zeros(stats_numel(handle.plan), dtype=torch.float64, device=device)
        self._all_received = torch.ones(len(self._stats) - STATS_FIXED, dtype=torch.float64, device=device)
        self._norm_of: SquaredNorm | None = None
        self._measured: int | None = None
        self._on_gpu = device.type == "cuda"
        self._outcome = torch.zeros(3, dtype=torch.float64, device=device)
        self._free_buffers = [torch.zeros(3, dtype=torch.float64, pin_memory=self._on_gpu) for _ in range(IN_FLIGHT)]
        self._outcomes: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._known_flags: dict[tuple[bool, ...], torch.Tensor] = {}
        self._digest = torch.zeros(2, dtype=torch.float64, device=device)
        self.captured_digest = 0

    def step(self, optimizer: ShardedOptimizer) -> None:
        """One optimizer step; errors of the one before are raised here."""
        self.read_outcomes()
        runtime, self.groups = self.handle.runtime, optimizer.param_groups
        runtime.inspect()
        if not runtime.gradients.present:
            self._report_nothing()
            return
        self._measure()
        squared, agree = self._stats[0], self._agree()
        norm = squared.sqrt() * self._unscale()
        finite = torch.isfinite(norm)
        ok = agree if self.applies_nonfinite else finite & agree
        limit = self._limit()
        coefficient = self._unscale()
        if limit > 0:
            coefficient = coefficient * torch.where(finite, (limit / (norm + 1e-6)).clamp(max=1.0), 1.0)
        self._report_outcome(norm, agree)
        active = (self._stats[STATS_FIXED:] > 0) & ok
        self._update_units(torch.where(ok, coefficient, 0.0), active, optimizer.param_groups)
        if self.scaler is not None:
            self.scaler.update(~ok)
        self._measured = None
        self._adopt_seen_order()
        runtime.after_step(changed=False, captured=self.capturing)

    def norm(self) -> float:
        """Norm of the averaged, unscaled gradients of the backwards since the last step. Waits for the device."""
        self._measure()
        return float(self._stats[0].sqrt() * self._unscale())

    def zero_grad(self) -> None:
        """Forget the gradients of the backwards since the last step."""
        self._measured = None
        self.handle.runtime.clear_gradients()

    def gradients_changed(self) -> None:
        """See StepperBase."""
        self._measured = None
        self._norm_of = None
        self.handle.runtime.gradients.squares.square_into(None, ())

    @property
    def outcome_known(self) -> bool:
        return not self._outcomes or self._outcomes[-1][1].query()

    def read_outcomes(self, *, but_newest: int = 0) -> None:
        """Read the outcomes of all steps except the newest so many; waits for them."""
        while len(self._outcomes) > but_newest:
            landing, landed = self._outcomes.popleft()
            landed.synchronize()
            values = landing.tolist()
            self._free_buffers.append(landing)
            self._conclude(*values)

    @property
    def update_method(self) -> DeviceUpdate:
        """The optimizer."""
        return self._update_method

    def prepare_replay(self, digest: int) -> None:
        """Copy the host values that a captured step reads to the device."""
        host = torch.tensor(digest_terms(digest), dtype=torch.float64)
        self._digest.copy_(host.pin_memory(), non_blocking=True)

    def replayed(self) -> None:
        """A captured step was launched: start the copy of its outcome to the host."""
        self._start_copy()

    @property
    def read_by_graphs(self) -> object:
        """An object that must live as long as a graph of a step, though this stepper may replace it."""
        return self._norm_of

    def _measure(self) -> None:
        """Finish the gradients and sum their statistics over the ranks, unless that was done for these gradients."""
        runtime, comm = self.handle.runtime, self.handle.comm
        if self._measured == runtime.gradients.collected:
            return
        runtime.finish_gradients()
        self._compare_copies()
        self._record_groups()
        owned = [group for group in self._counted_groups() if not group.plan.grad_off_device]
        if self._norm_of is None:
            self._norm_of = SquaredNorm([own_pieces(group) for group in owned], self.handle.device)
            runtime.gradients.squares.square_into(self._norm_of, owned)
        runtime.gradients.squares.square_rest(owned)
        self._norm_of.into(self._stats[0])
        for place, group in enumerate(self._groups_on_host()):
            self._stats[0] += runtime.gradients.squares.total(group)
            bad = runtime.gradients.squares.first_bad(group)
            numbered = torch.where(bad < FINITE, bad + _HOST_TILES * (place + 1), FINITE)
            torch.minimum(self._norm_of.first_bad, numbered, out=self._norm_of.first_bad)
        digest = comm.log.digest()
        if self.capturing:
            self.captured_digest = digest
            self._stats[1:STATS_FIXED].copy_(self._digest)
        else:
            first, second = digest_terms(digest)
            self._stats[1].fill_(first)
            self._stats[2].fill_(second)
        self._stats[STATS_FIXED:].copy_(self._flags())
        comm.control.wait(comm.control.all_reduce(self._stats, "(step)"))
        if comm.stages is not None:
            comm.stages.add_statistics(self._stats, comm.control.size)
        self._measured = runtime.gradients.collected

    def _flags(self) -> torch.Tensor:
        runtime = self.handle.runtime
        received = tuple(flag for unit in runtime.units for group in runtime.gradients.received(unit) for flag in group)
        if all(received):
            return self._all_received
        found = self._known_flags.get(received)
        if found is None:
            if self.capturing:
                raise UsageError(
                    "other parameters got gradients while the step was captured than in the steps before, so a replay "
                    "would not do what the function does; don't capture a step whose path depends on data"
                )
            host = torch.tensor(received, dtype=torch.float64)
            found = host.pin_memory().to(self.handle.device, non_blocking=True) if self._on_gpu else host
            if len(self._known_flags) < FLAGS_KEPT:
                self._known_flags[received] = found
        return found

    @property
    def capturing(self) -> bool:
        """See StepperBase."""
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def _agree(self) -> torch.Tensor:
        return self._stats[2] * self.handle.comm.control.size == self._stats[1].square()

    def _unscale(self) -> torch.Tensor:
        factor = torch.full((), self._mean_factor(), dtype=torch.float64, device=self.handle.device)
        return factor if self.scaler is None else factor / self.scaler.scale

    def _report_outcome(self, norm: torch.Tensor, agree: torch.Tensor) -> None:
        """Start the copy of the outcome to the host; for a captured step `replayed` does it."""
        assert self._norm_of is not None
        self._outcome.copy_(torch.stack([norm, agree.double(), self._norm_of.first_bad.double()]))
        if not self._on_gpu:
            self._conclude(*self._outcome.tolist())
        elif not self.capturing:
            self._start_copy()

    def _start_copy(self) -> None:
        landing = self._free_buffers.pop()
        landing.copy_(self._outcome, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        self._outcomes.append((landing, landed))

    def _conclude(self, norm: float, agree: float, tile: float) -> None:
        """Act on an outcome that has reached the host."""
        if not agree:
            self.handle.comm.explain_mismatch()
        if math.isfinite(norm) or self.applies_nonfinite:
            self._report_applied(norm)
        else:
            self._report_skipped(norm, self._name_of_tile(int(tile)), None)

    def _counted_groups(self) -> list[Group]:
        """The groups whose squares this rank adds; of several copies of a group only one is counted."""
        return [g for u in self.handle.runtime.units for g in u.trainable if g.counted]

    def _groups_on_host(self) -> list[Group]:
        """The counted groups whose gradients have been squared already, and rest in host memory."""
        return [group for group in self._counted_groups() if group.plan.grad_off_device]

    def _name_of_tile(self, tile: int) -> str:
        """The parameter of the first tile of gradients that is not finite, if it is on this rank."""
        if tile >= FINITE or self._norm_of is None:
            return "a parameter of another rank's part"
        if tile >= _HOST_TILES:
            group = self._groups_on_host()[tile // _HOST_TILES - 1]
            low = self.handle.runtime.gradients.squares.first_in_tile(group, tile % _HOST_TILES)
        else:
            number, low = self._norm_of.place_of(tile)
            group = [group for group in self._counted_groups() if not group.plan.grad_off_device][number]
        start, _ = group.plan.layout.shard_range(group.rank)
        ((index, _, _),) = group.plan.layout.pieces(start + low, start + low + 1)
        return group.plan.layout.segments[index].name

    def _update_units(
        self, coefficient: torch.Tensor, active: torch.Tensor, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        runtime = self.handle.runtime
        runtime.parameters.before_write()
        self._before_updates()
        with torch.no_grad():
            self._update_method.prepare(coefficient, active, groups)
            for index in dict.fromkeys(runtime.plan.order):
                self._update_unit(index, self._regions[index])
        runtime.parameters.mark_all_updated()
        runtime.parameters.invalidate()

    def _before_updates(self) -> None:
        """Called before compute prepares the updates."""

    def _update_unit(self, index: int, numbers: range) -> None:
        """Update the regions of a unit, and mark it as written."""
        for number in numbers:
            self._update_method.apply(number)
        self.handle.runtime.parameters.mark_unit_written(index)
