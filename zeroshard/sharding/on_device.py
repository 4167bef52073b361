"""DeepSpeed's OnDevice: a context in which modules are built on one device, 'meta' by default, and in one dtype.

It uses torch's own device context and default dtype; nothing is patched. For a model that is to be trained use
`zeroshard.Init`: it gives the values of an ordinary build, which a model on the meta device does not have.
"""

from __future__ import annotations

from types import TracebackType

import torch

from zeroshard.arguments import need_kind
from zeroshard.errors import UsageError


class OnDevice:
    """Inside the with-block new floating-point tensors are `dtype` on `device`.

    Args:
        dtype: a floating-point dtype.
        enabled: False makes this a context that does nothing.

    Raises:
        UsageError: the dtype is not a floating-point one, or there is no such device.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        need_kind(dtype, torch.dtype, "OnDevice", "a floating-point dtype such as torch.bfloat16")
        need_kind(device, (str, torch.device), "OnDevice(device=...)", "a device or its name")
        if not dtype.is_floating_point:
            raise UsageError(f"OnDevice: {dtype} is no floating-point dtype; use torch.float32, bfloat16 or float16")
        self._dtype = dtype
        try:
            self._device = torch.device(device)
        except RuntimeError as error:
            raise UsageError(f"OnDevice: there is no device {device!r}; 'meta', 'cpu' or 'cuda' is usual") from error
        self._enabled = enabled
        self._before = torch.get_default_dtype()

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._device.__exit__(kind, error, trace)
            torch.set_default_dtype(self._before)
