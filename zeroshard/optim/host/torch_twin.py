"""The host kernels in plain PyTorch: the reference for tests, used if there was no compiler at installation.

All operations are done on one block after the other, with a few buffers of a block's size. A block fits into a core's
cache.

    gradient --> g     moments in bfloat16 --> m, v     g, t: intermediate results

Every operation rounds once, to nearest. `add_(x, alpha)` and `addcmul_` are avoided, since torch fuses them in vector
code but not in the remainder; roots are numpy's, since torch's math library does not always return the nearest float32.
It moves the tensors between cache and registers about twenty times, the native kernel once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from zeroshard.optim.host.kernel import Squares
from zeroshard.optim.host.scalars import AdagradScalars, AdamScalars, LionScalars, Scalars

BLOCK = 1 << 16
"""Elements of a block: 256 KiB in float32."""


class TorchTwin:
    """A Backend. It uses torch's threads (`torch.set_num_threads`) and ignores `threads`."""

    name = "torch"

    @torch.no_grad()
    def step(
        self,
        scalars: Scalars,
        master: torch.Tensor,
        grad: torch.Tensor,
        state: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        threads: int,
    ) -> None:
        """See HostKernel."""
        buffers = _buffers(4, master.numel())
        for cut in _blocks(master.numel()):
            g, t, *room = (buffer[: cut.stop - cut.start] for buffer in buffers)
            p, moments = master[cut], [_as_float32(kind[cut], one) for kind, one in zip(state, room, strict=False)]
            g.copy_(grad[cut]).mul_(scalars.coefficient)
            if isinstance(scalars, AdamScalars):
                _adam(scalars, p, g, moments[0], moments[1], t)
            elif isinstance(scalars, LionScalars):
                _lion(scalars, p, g, moments[0], t, room[1])
            elif isinstance(scalars, AdagradScalars):
                _adagrad(scalars, p, g, moments[0], t)
            for kind, moment in zip(state, moments, strict=True):
                _copy_back(moment, kind[cut])
            if out is not None:
                out[cut].copy_(p)

    @torch.no_grad()
    def squares(self, grad: torch.Tensor, threads: int) -> Squares:
        """See HostKernel."""
        total, first_bad = 0.0, None
        for cut in _blocks(grad.numel()):
            total += float(grad[cut].double().square_().sum())
            if first_bad is None and not grad[cut].isfinite().all():
                first_bad = cut.start + int(grad[cut].isfinite().logical_not_().nonzero()[0, 0])
        return Squares(total, first_bad)


def _adam(
    scalars: AdamScalars, p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, t: torch.Tensor
) -> None:
    if scalars.decoupled:
        p.mul_(scalars.decay)
    else:
        g.add_(torch.mul(p, scalars.decay, out=t))
    m.add_(torch.sub(g, m, out=t).mul_(scalars.one_beta1))
    v.mul_(scalars.beta2).add_(g.mul_(g).mul_(scalars.one_beta2))
    _root(v, g).mul_(scalars.correction).add_(scalars.eps)
    p.sub_(torch.mul(m, scalars.step_size, out=t).div_(g))


def _lion(
    scalars: LionScalars, p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, t: torch.Tensor, u: torch.Tensor
) -> None:
    torch.mul(m, scalars.beta1, out=t).add_(torch.mul(g, scalars.one_beta1, out=u))
    p.mul_(scalars.decay).sub_(torch.sign(t, out=t).mul_(scalars.lr))
    m.mul_(scalars.beta2).add_(g.mul_(scalars.one_beta2))


def _adagrad(scalars: AdagradScalars, p: torch.Tensor, g: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> None:
    g.add_(torch.mul(p, scalars.decay, out=t))
    s.add_(torch.mul(g, g, out=t))
    _root(s, t).add_(scalars.eps)
    p.sub_(g.mul_(scalars.rate).div_(t))


def _blocks(numel: int) -> Iterator[slice]:
    for low in range(0, numel, BLOCK):
        yield slice(low, min(low + BLOCK, numel))


def _buffers(count: int, numel: int) -> list[torch.Tensor]:
    return list(torch.empty(count, min(numel, BLOCK), dtype=torch.float32).unbind())


def _as_float32(moment: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """A moment in float32: the moment itself, or a copy in `room`."""
    return moment if moment.dtype == torch.float32 else room.copy_(moment)


def _copy_back(value: torch.Tensor, moment: torch.Tensor) -> None:
    """Copy a moment back to where it rests, if `_as_float32` copied it."""
    if moment.dtype != torch.float32:
        moment.copy_(value)


def _root(value: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    np.sqrt(value.numpy(), out=out.numpy())
    return out
