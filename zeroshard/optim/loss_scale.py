"""The loss scale of fp16 training, kept on the device.

    loss * scale -> backward -> gradients / scale -> found_nonfinite (a tensor) -> update(found_nonfinite)

Its state is five scalars that live where the gradients live, and `update` is arithmetic on them: the host learns
nothing and waits for nothing, so a step never stalls the device to ask whether it overflowed. The rejected alternative,
a Python number fed by `.item()`, costs one full stop of the device in each step. Whoever wants the numbers reads them
when it suits (`state_dict`), at the price of that one wait.

The rules are those of DeepSpeed's dynamic scaler (Micikevicius et al. 2018, section 3.2, with hysteresis), but for one:
an overflow at the minimum scale raises nothing here. NaNs that come from the model stay at every scale, and an
exception about the scale hides them; `consecutive_skips` lets the engine say so with the parameter's name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeroshard.errors import CheckpointError, ConfigError

FACTOR = 2.0
CEILING = 2.0**126
"""Gradients that are all zero let the scale grow for ever; at inf it could never come back."""
_MOST = 2**31 - 1
"""Of a counter: more steps than that no run has, so a larger window or hysteresis means the same, never."""


class LossScaler:
    """The scale and its counters as device scalars.

    Args:
        device: where the gradients live.
        dynamic: False keeps `initial` for ever.
        initial: the first scale.
        window: the scale doubles in a good step that follows so many in a row, or a multiple of so many.
        hysteresis: overflows that it takes to halve the scale; all but the last are tolerated.
        consecutive_hysteresis: True lets any good step renew the tolerance; False only a growth.
        minimum: the scale never falls below.

    Raises:
        ConfigError: a value out of range.

    Attributes:
        scale: fp32, what the loss is multiplied by.
        good_steps: int32, steps without overflow since the last overflow.
        hysteresis_left: int32, overflows until the scale is halved, this one included.
        consecutive_skips: int32, overflows in a row up to now; 0 after a good step.
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
        self.window = min(window, _MOST)
        self.hysteresis = min(hysteresis, _MOST)
        self.consecutive_hysteresis = consecutive_hysteresis
        self.minimum = minimum
        self.scale = torch.tensor(initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.hysteresis_left = torch.full((), self.hysteresis, dtype=torch.int32, device=device)
        self.consecutive_skips = torch.zeros((), dtype=torch.int32, device=device)
        self.total_skips = torch.zeros((), dtype=torch.int32, device=device)

    @torch.no_grad()
    def update(self, found_nonfinite: torch.Tensor) -> None:
        """Moves the state by one step, in place (captured graphs and other holders of the tensors see it).

        Args:
            found_nonfinite: one element, on the scaler's device, nonzero (or True) where a gradient was inf or NaN
                anywhere, so equal on all ranks.
        """
        bad = found_nonfinite.reshape(()) != 0
        self.consecutive_skips.copy_(torch.where(bad, self.consecutive_skips + 1, 0))
        self.total_skips.add_(bad)
        if self.dynamic:
            self._move(bad)

    def _move(self, bad: torch.Tensor) -> None:
        good_steps = torch.where(bad, 0, self.good_steps + 1)
        grow = (good_steps > 1) & ((good_steps - 1) % self.window == 0)
        shrink = bad & (self.hysteresis_left == 1)

        smaller = (self.scale / FACTOR).clamp_(min=self.minimum)
        scale = torch.where(shrink, smaller, self.scale)
        self.scale.copy_(torch.where(grow, (scale * FACTOR).clamp_(max=CEILING), scale))

        # An overflow that halves the scale leaves the count at 1: the next one halves again at once.
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
        """Takes what `state_dict` gave, in place. A static scale keeps the value it was made with.

        Raises:
            CheckpointError: an entry is missing or can't be.
        """
        self.check_state(state)
        for name, tensor in self._tensors().items():
            if name != "scale" or self.dynamic:
                tensor.fill_(state[name])

    def check_state(self, state: Mapping[str, float | int]) -> None:
        """Raises CheckpointError for what `load_state_dict` can't take."""
        missing = sorted(set(self._tensors()) - set(state))
        if missing:
            raise CheckpointError(f"the loss scaler's state lacks {', '.join(missing)}; the checkpoint is not complete")
        for name in self._tensors():
            value, most = state[name], CEILING if name == "scale" else _MOST
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
