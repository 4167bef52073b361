"""What scripts ask the engine about its config, as DeepSpeed's engine answers it.

The answers are of what runs: where the config left a choice to zeroshard ("auto"), of what was chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from zeroshard.plan.plan import Plan


@dataclass(frozen=True)
class Settings:
    """What the config says that no plan remembers.

    Attributes:
        stage: the ZeRO stage.
        compute: dtype that parameters are stored in for compute: fp32, bf16 or fp16.
    """

    stage: int = 0
    compute: str = "fp32"


class AsksSettings(ABC):
    """The questions. Whoever answers them has the settings and the plan."""

    @property
    @abstractmethod
    def _settings(self) -> Settings:
        """What the config says."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The plan that runs."""

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, also where it was chosen at the start."""
        return self._settings.stage

    def zero_optimization(self) -> bool:
        """Whether anything is divided among ranks by the config."""
        return self._settings.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are."""
        return self._settings.stage > 1

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are."""
        return self._settings.stage > 2

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are stored in bfloat16."""
        return self._settings.compute == "bf16"

    def fp16_enabled(self) -> bool:
        """Whether parameters are stored in float16."""
        return self._settings.compute == "fp16"

    def gradient_clipping(self) -> float:
        """The global gradient norm above which gradients are scaled down; 0 is none."""
        return self.plan.policy.clip_norm

    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are summed over the ranks."""
        return self.plan.policy.predivide
