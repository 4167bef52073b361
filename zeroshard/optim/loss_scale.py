"""The loss scale of fp16 training, kept on the device.

    loss * scale -> backward -> gradients / scale -> found_nonfinite (a tensor) -> update(found_nonfinite)

Its state is five scalars on the gradients' device, and `update` is arithmetic on them, so the host does not wait in a
step to learn whether the gradients overflowed. Rejected: a Python number, which needs `.item()` and a synchronization
in each step. `state_dict` reads the numbers, and waits for the device.

The rules are those of DeepSpeed's dynamic scaler (Micikevicius et al. 2018, section 3.2, with hysteresis), except that
an overflow at the minimum scale is no error here. NaNs that come from the model occur at every scale, and an exception
about the scale would hide them; with `consecutive_skips` the engine reports them with the parameter's name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeroshard.errors import CheckpointError, ConfigError

FACTOR = 2.0
CEILING = 2.0**126
"""The largest scale: without a limit, gradients that are all zero would let it grow to inf."""
_MAX_COUNT = 2**31 - 1
"""The limit of counters, in int32. A larger window or hysteresis has the same effect: no run has so many steps."""


class LossScaler:
    """The scale and its counters as device scalars.

    Args:
        device: the device of the gradients.
        dynamic: False never changes the scale.
        initial: the first scale.
        window: the scale doubles in the step after each so many consecutive steps without overflow.
        hysteresis: the scale is halved at this many overflows; the ones before only count.
        consecutive_hysteresis: whether any step without overflow resets that count; else only a doubling does.
        minimum: the smallest scale.

    Raises:
        ConfigError: a value is out of range.

    Attributes:
        scale: fp32, the factor of the loss.
        good_steps: int32, steps since the last overflow.
        hysteresis_left: int32, at how many further overflows the scale is halved.
        consecutive_skips: int32, consecutive overflows up to now; 0 after a step without.
        total_skips: int32, overflows in the whole run.
    """

    def __init__(
        self,
        device: torch.device | str,
        dynamic: bool = True,
        initial: float = 65536.0,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        minimum: float = 1.0,
    ):
        for name, value, least in (("loss_scale_window", window, 1), ("hysteresis", hysteresis, 1)):
            if value < least:
                raise ConfigError(f"fp16.{name} must be {least} or more, got {value}")
        for name, value in (("loss_scale", initial), ("min_loss_scale", minimum)):
            if not 0 < value <= CEILING:
                raise ConfigError(f"fp16.{name} must be above 0 and at most 2**126, got {value}")
        self.dynamic = dynamic
        self.window = min(window, _MAX_COUNT)
        self.hysteresis = min(hysteresis, _MAX_COUNT)
        self.consecutive_hysteresis = consecutive_hysteresis
        self.minimum = minimum
        self.scale = torch.tensor(initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.hysteresis_left = torch.full((), self.hysteresis, dtype=torch.int32, device=device)
        self.consecutive_skips = torch.zeros((), dtype=torch.int32, device=device)
        self.total_skips = torch.zeros((), dtype=torch.int32, device=device)

    @torch.no_grad()
    def update(self, found_nonfinite: torch.Tensor) -> None:
        """Update the state after a step, in place, so that captured graphs read the new values.

        Args:
            found_nonfinite: one element, on the scaler's device, nonzero (or True) if any gradient on any rank was inf
                or NaN; equal on all ranks.
        """
        bad = found_nonfinite.reshape(()) != 0
        self.consecutive_skips.copy_(torch.where(bad, self.consecutive_skips + 1, 0))
        self.total_skips.add_(bad)
        if self.dynamic:
            self._update_scale(bad)

    def _update_scale(self, bad: torch.Tensor) -> None:
        good_steps = torch.where(bad, 0, self.good_steps + 1)
        grow = (good_steps > 1) & ((good_steps - 1) % self.window == 0)
        shrink = bad & (self.hysteresis_left == 1)

        smaller = (self.scale / FACTOR).clamp_(min=self.minimum)
        scale = torch.where(shrink, smaller, self.scale)
        self.scale.copy_(torch.where(grow, (scale * FACTOR).clamp_(max=CEILING), scale))

        # An overflow that halves the scale leaves the count at 1, so the next overflow halves it again.
        left = torch.where(bad & ~shrink, self.hysteresis_left - 1, self.hysteresis_left)
        renewed = ~bad if self.consecutive_hysteresis else grow
        self.hysteresis_left.copy_(torch.where(renewed, self.hysteresis, left))

        self.good_steps.copy_(good_steps)

    def state_dict(self) -> dict[str, float | int]:
        """The state as plain numbers, for a checkpoint. Waits for the device."""
        return {
            "scale": float(self.scale),
            "good_steps": int(self.good_steps),
            "hysteresis_left": int(self.hysteresis_left),
            "consecutive_skips": int(self.consecutive_skips),
            "total_skips": int(self.total_skips),
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Load what `state_dict` returned, in place. A static scale keeps its initial value.

        Raises:
            CheckpointError: an entry is missing or out of range.
        """
        self.check_state(state)
        for name, tensor in self._tensors().items():
            if name != "scale" or self.dynamic:
                tensor.fill_(state[name])

    def check_state(self, state: Mapping[str, float | int]) -> None:
        """Raises CheckpointError for what `load_state_dict` can't load."""
        missing = sorted(set(self._tensors()) - set(state))
        if missing:
            raise CheckpointError(f"the loss scaler's state lacks {', '.join(missing)}; the checkpoint is not complete")
        for name in self._tensors():
            value, most = state[name], CEILING if name == "scale" else _MAX_COUNT
            if not isinstance(value, (int, float)) or not 0 <= value <= most:
                raise CheckpointError(f"the loss scaler's state says {name} = {value!r}; the checkpoint is damaged")

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "hysteresis_left": self.hysteresis_left,
            "consecutive_skips": self.consecutive_skips,
            "total_skips": self.total_skips,
        }
