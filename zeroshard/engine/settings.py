"""The engine's methods that answer questions about its config, with the names that DeepSpeed's engine has.

The answers describe what runs: if the config leaves a choice to zeroshard ("auto"), they give what was chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from zeroshard.plan.plan import Plan


@dataclass(frozen=True)
class Settings:
    """The settings of the config that are not in the plan.

    Attributes:
        stage: the ZeRO stage.
        compute: dtype that parameters are stored in for compute: fp32, bf16 or fp16.
    """

    stage: int = 0
    compute: str = "fp32"


class AnswersSettings(ABC):
    """The questions; a subclass has the settings and the plan."""

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
        """Whether the config divides any state among ranks."""
        return self._settings.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are divided."""
        return self._settings.stage > 1

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are divided."""
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
        """The divisor of gradients before they are summed over the ranks."""
        return self.plan.policy.predivide
