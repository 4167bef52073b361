"""The step without a host that waits: norm, clipping, overflow and loss scale stay on the device.

    finish gradients -> squares -> small all-reduce -> [ok, norm, coefficient] -> table of scalars -> update per unit
                                                            |
                                                            +--> outcome -> pinned memory, read at the next step

What step n did is looked at when step n+1 begins (or when somebody asks): a step with inf or NaN in its gradients has
changed nothing by then, and the loss scale has moved already. Units are updated in the order in which the next forward
gathers them, each gather waiting only for its own unit's update.
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
"""Steps whose outcome the host may not have looked at yet."""
FLAGS_KEPT = 64
_LANDED = 2**40
"""Tiles of gradients that went to host memory are numbered from here on, each group in a range of so many."""


class DeviceStepper(StepperBase):
    """Runs steps on a GPU with an optimizer that needs no host.

    Attributes:
        captured_digest: of this rank's operations up to the step that went into a graph last.
    """

    def __init__(self, handle: Handle, update: DeviceUpdate, scaler: LossScaler | None) -> None:
        super().__init__(handle, update, scaler)
        device = handle.device
        self._update_method = update
        self._regions = regions_of_units(handle.runtime)
        self._stats = torch.zeros(stats_numel(handle.plan), dtype=torch.float64, device=device)
        self._all_fired = torch.ones(len(self._stats) - STATS_FIXED, dtype=torch.float64, device=device)
        self._norm_of: SquaredNorm | None = None
        self._measured: int | None = None
        self._on_gpu = device.type == "cuda"
        self._outcome = torch.zeros(3, dtype=torch.float64, device=device)
        self._landing_places = [torch.zeros(3, dtype=torch.float64, pin_memory=self._on_gpu) for _ in range(IN_FLIGHT)]
        self._landings: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._flags_seen: dict[tuple[bool, ...], torch.Tensor] = {}
        self._digest = torch.zeros(2, dtype=torch.float64, device=device)
        self.captured_digest = 0

    def step(self, optimizer: ShardedOptimizer) -> None:
        """One optimizer step; errors of the one before are raised here."""
        self.settle()
        runtime, self.groups = self.handle.runtime, optimizer.param_groups
        runtime.inspect()
        if not runtime.gradients.present:
            self._nothing_done()
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
        self._send(norm, agree)
        active = (self._stats[STATS_FIXED:] > 0) & ok
        self._update_units(torch.where(ok, coefficient, 0.0), active, optimizer.param_groups)
        if self.scaler is not None:
            self.scaler.update(~ok)
        self._measured = None
        self._learn_order()
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
    def settled(self) -> bool:
        return not self._landings or self._landings[-1][1].query()

    def settle(self) -> None:
        """Look at what the steps so far did; waits for them."""
        self.settle_but(0)

    def settle_but(self, newest: int) -> None:
        """Look at what the steps did, but for so many of the newest; waits for them."""
        while len(self._landings) > newest:
            landing, landed = self._landings.popleft()
            landed.synchronize()
            values = landing.tolist()
            self._landing_places.append(landing)
            self._conclude(*values)

    @property
    def update_method(self) -> DeviceUpdate:
        """The optimizer."""
        return self._update_method

    def prepare_replay(self, digest: int) -> None:
        """Put what a captured step reads of the host where it finds it."""
        host = torch.tensor(digest_terms(digest), dtype=torch.float64)
        self._digest.copy_(host.pin_memory(), non_blocking=True)

    def replayed(self) -> None:
        """A captured step was launched: its outcome comes to the host as that of any other."""
        self._land()

    @property
    def read_by_graphs(self) -> object:
        """What must live as long as a graph of a step, beside what lives as long as this."""
        return self._norm_of

    def _measure(self) -> None:
        """Finish the gradients and sum their statistics over the ranks, once for what there is."""
        runtime, comm = self.handle.runtime, self.handle.comm
        if self._measured == runtime.gradients.collected:
            return
        runtime.finish_gradients()
        self._record_groups()
        owned = [group for group in self._counted_groups() if not group.plan.grad_away]
        if self._norm_of is None:
            self._norm_of = SquaredNorm([own_pieces(group) for group in owned], self.handle.device)
            runtime.gradients.squares.square_into(self._norm_of, owned)
        runtime.gradients.squares.square_rest(owned)
        self._norm_of.into(self._stats[0])
        for place, group in enumerate(self._landed_groups()):
            self._stats[0] += runtime.gradients.squares.total(group)
            bad = runtime.gradients.squares.first_bad(group)
            numbered = torch.where(bad < FINITE, bad + _LANDED * (place + 1), FINITE)
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
            return self._all_fired
        found = self._flags_seen.get(received)
        if found is None:
            if self.capturing:
                raise UsageError(
                    "other parameters got gradients while the step was captured than in the steps before, so a replay "
                    "would not do what the function does; don't capture a step whose path depends on data"
                )
            host = torch.tensor(received, dtype=torch.float64)
            found = host.pin_memory().to(self.handle.device, non_blocking=True) if self._on_gpu else host
            if len(self._flags_seen) < FLAGS_KEPT:
                self._flags_seen[received] = found
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

    def _send(self, norm: torch.Tensor, agree: torch.Tensor) -> None:
        """Start the copy of the outcome to the host; a captured step has that done after each replay."""
        assert self._norm_of is not None
        self._outcome.copy_(torch.stack([norm, agree.double(), self._norm_of.first_bad.double()]))
        if not self._on_gpu:
            self._conclude(*self._outcome.tolist())
        elif not self.capturing:
            self._land()

    def _land(self) -> None:
        landing = self._landing_places.pop()
        landing.copy_(self._outcome, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        self._landings.append((landing, landed))

    def _conclude(self, norm: float, agree: float, tile: float) -> None:
        """The outcome has reached the host."""
        if not agree:
            self.handle.comm.explain_mismatch()
        if math.isfinite(norm) or self.applies_nonfinite:
            self._done(norm)
        else:
            self._skipped(norm, self._culprit(int(tile)), None)

    def _counted_groups(self) -> list[Group]:
        """The groups whose squares this rank adds; a copy of a unit divided within a subgroup counts once."""
        return [g for u in self.handle.runtime.units for g in u.trainable if g.counted]

    def _landed_groups(self) -> list[Group]:
        """The counted groups whose gradients have been squared already, and rest in host memory."""
        return [group for group in self._counted_groups() if group.plan.grad_away]

    def _culprit(self, tile: int) -> str:
        """The parameter of the first tile of gradients that is not finite, if it is on this rank."""
        if tile >= FINITE or self._norm_of is None:
            return "a parameter of another rank's part"
        if tile >= _LANDED:
            group = self._landed_groups()[tile // _LANDED - 1]
            low = self.handle.runtime.gradients.squares.first_in_tile(group, tile % _LANDED)
        else:
            number, low = self._norm_of.place_of(tile)
            group = [group for group in self._counted_groups() if not group.plan.grad_away][number]
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
        """Compute is about to prepare the updates."""

    def _update_unit(self, index: int, numbers: range) -> None:
        """Update the regions of a unit, and tell when that has happened."""
        for number in numbers:
            self._update_method.apply(number)
        self.handle.runtime.parameters.mark_unit_written(index)
