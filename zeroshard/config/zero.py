"""What the keys of `zero_optimization` mean together: subgroups of ranks, gathers and sums in codes, offload.

Values have been checked one by one before (models.py). Here are the rules between them, and with the stage and the
number of ranks; what can't hold goes to the list of problems, and the rest of the config is looked at all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from zeroshard.config.models import LocoSection, OffloadOptimizerSection, OffloadParamSection, ZeroSection
from zeroshard.config.problems import Problems
from zeroshard.config.resolved import OffloadConfig


class ZeroRules:
    """Reads one `zero_optimization`.

    Args:
        origin: where a key was written, for messages.
        trains: whether there is an optimizer.
    """

    def __init__(
        self, zero: ZeroSection, problems: Problems, origin: Callable[[str], str], world_size: int, *, trains: bool
    ) -> None:
        self._zero, self._problems, self._origin = zero, problems, origin
        self._world_size, self._trains = world_size, trains

    def subgroup(self) -> tuple[int | None, bool]:
        """Ranks of a subgroup, and whether it is for second copies of the parameters; None where all are one group."""
        hpz, mics = self._zero.zero_hpz_partition_size, self._zero.mics_shard_size
        section = "zero_optimization"
        copies, state = hpz > 1, mics is not None and mics > 0
        path = f"{section}.zero_hpz_partition_size" if copies else f"{section}.mics_shard_size"
        size = hpz if copies else mics
        if not (copies or state):
            return None, False
        assert size is not None
        if copies and state:
            self._refuse(path, f"is {hpz}, and {section}.mics_shard_size is {mics}: give one of them")
        elif self._zero.stage == "auto":
            self._refuse(path, f'is {size}, and {section}.stage is "auto": the planner does not choose among subgroups')
        elif copies and self._zero.stage != 3 and not (self._zero.zero_quantized_gradients and self._zero.stage):
            what = "at stages 1 and 2, where parameters rest whole, it needs zero_quantized_gradients"
            self._refuse(path, f"is {size}, which is for stage 3; {what}")
        elif state and self._zero.stage == 0:
            self._refuse(path, f"is {size}, but at stage 0 nothing is divided; use stage 1, 2 or 3")
        elif self._world_size % size:
            self._refuse(path, f"is {size}, which does not divide {self._world_size} ranks into equal subgroups")
        else:
            return size, copies
        return None, False

    def codes(self) -> Literal["none", "frozen", "all"]:
        """Which sharded parameters are gathered as codes."""
        every, frozen = self._zero.zero_quantized_weights, self._zero.zero_quantized_nontrainable_weights
        bits, path = self._zero.zero_quantized_weights_bits, "zero_optimization.zero_quantized_weights_bits"
        if bits not in (4, 8):
            self._refuse(path, f"is {bits}; codes of 8 and of 4 bits are there")
        if not (every or frozen):
            if bits != 8:
                self._problems.warn(f"{path} ({self._origin(path)}) has no effect without zero_quantized_weights")
            return "none"
        if self._zero.stage not in (3, "auto"):
            path = f"zero_optimization.zero_quantized_{'weights' if every else 'nontrainable_weights'}"
            self._refuse(path, f"is true, which is for stage 3; at stage {self._zero.stage} parameters rest whole")
        return "all" if every else "frozen"

    def differences(self) -> bool:
        """Whether second copies get what a step has changed."""
        path = "zero_optimization.zero_quantized_weight_differences"
        if not self._zero.zero_quantized_weight_differences:
            return False
        if self._zero.stage != 3 or self._zero.zero_hpz_partition_size == 1:
            what = "which is for second copies of the parameters: it needs stage 3 and zero_hpz_partition_size"
            self._refuse(path, f"is true, {what}")
        return True

    def quantized_gradients(self) -> bool:
        """Whether gradients are summed in codes."""
        zero, section = self._zero, "zero_optimization"
        path = f"{section}.zero_quantized_gradients"
        if not zero.zero_quantized_gradients:
            if zero.zeropp_loco_param != LocoSection():
                where = f"{section}.zeropp_loco_param"
                self._problems.warn(f"{where} ({self._origin(where)}) has no effect without {path}")
            return False
        if zero.stage == 0:
            self._refuse(path, "is true, but at stage 0 every rank keeps all gradients; use stage 1, 2 or 3")
        elif zero.mics_shard_size is not None and zero.mics_shard_size > 0:
            what = "whose subgroups each hold a copy of the state; sums over copies are exact. Use"
            copies = f"{section}.zero_hpz_partition_size"
            self._refuse(path, f"is true, and {section}.mics_shard_size is {zero.mics_shard_size}, {what} {copies}")
        return True

    def offload(self) -> OffloadConfig | None:
        """What rests in host memory or on disk."""
        optimizer, param, section = self._zero.offload_optimizer, self._zero.offload_param, "zero_optimization"
        if optimizer.device != "none" and self._zero.stage == 0:
            what = f'is "{optimizer.device}", which needs state that is divided; use stage 1, 2 or 3'
            self._refuse(f"{section}.offload_optimizer.device", what)
        moves_param = param.device != "none" and self._moves_param()
        if optimizer.device == "none" and not moves_param:
            return None
        sections = {"offload_optimizer": optimizer} | ({"offload_param": param} if moves_param else {})
        on_disk = {name: found for name, found in sections.items() if found.device == "nvme"}
        state = param.device if optimizer.device == "none" else optimizer.device
        return OffloadConfig(
            1.0 if moves_param else optimizer.ratio,
            moves_param,
            (param if optimizer.device == "none" else optimizer).pin_memory,
            tuple(dict.fromkeys(path for name, found in on_disk.items() for path in self._paths(name, found))),
            any(found.encrypt for found in on_disk.values()),
            any(found.allow_visible_spill for found in on_disk.values()),
            state_on_disk=state == "nvme",
            param_on_disk=moves_param and param.device == "nvme",
            host_ratio=self._host_ratio(),
        )

    def _host_ratio(self) -> float:
        """The share of the state in host memory, where the rest is on disk."""
        optimizer, path = self._zero.offload_optimizer, "zero_optimization.offload_optimizer.cpu_ratio"
        if optimizer.cpu_ratio and optimizer.device != "nvme":
            self._refuse(path, f'is {optimizer.cpu_ratio}, a part of what device "nvme" takes; set that, or use ratio')
        elif optimizer.cpu_ratio > optimizer.ratio:
            self._refuse(path, f"is {optimizer.cpu_ratio}, more than the ratio, {optimizer.ratio}")
        return optimizer.cpu_ratio

    def _paths(self, name: str, asked: OffloadOptimizerSection | OffloadParamSection) -> tuple[str, ...]:
        """The folders of a section whose device is "nvme"."""
        section, paths = f"zero_optimization.{name}", asked.nvme_path or ()
        if self._zero.stage == "auto":
            what = 'is "nvme", which "stage": "auto" does not choose among; write the stage, or leave the device out'
            self._refuse(f"{section}.device", what)
        elif not paths or "" in paths:
            what = 'is "nvme", which needs a folder on a local disk; set nvme_path beside it'
            self._refuse(f"{section}.device", what)
        elif len(set(paths)) < len(paths):
            self._refuse(f"{section}.nvme_path", "names a folder twice; name each disk once")
        return paths

    def _moves_param(self) -> bool:
        """Whether parameters rest off the device, where offload_param asks for it; says what goes along, or why not."""
        optimizer, device = self._zero.offload_optimizer, self._zero.offload_param.device
        path, where = "zero_optimization.offload_param.device", "disk" if device == "nvme" else "host memory"
        origin = self._origin(path)
        if self._zero.stage not in (3, "auto"):
            self._problems.warn(
                f'{path} ({origin}): "{device}" has no effect at stage {self._zero.stage}, only at stage 3'
            )
            return False
        if optimizer.device != "none" and optimizer.ratio < 1:
            self._refuse(path, f'is "{device}", which needs an offload_optimizer of ratio 1')
        elif optimizer.device == "none" and self._trains:
            self._problems.warn(
                f'{path} ({origin}): "{device}" takes the optimizer\'s state to {where} too; say so with '
                f'"offload_optimizer": {{"device": "{device}"{", ..." if device == "nvme" else ""}}}'
            )
        return True

    def _refuse(self, path: str, what: str) -> None:
        self._problems.add(path, self._origin(path), what)
