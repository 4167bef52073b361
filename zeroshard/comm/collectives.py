"""The collectives that the engine issues: logged, asynchronous, and waited for without ever hanging silently.

    issue:  log ──> c10d ──> Pending(work, kind, unit)
    wait :  done already? ──> work.wait(); else waits of a fifth of a second, with checks of the watchdog in between

Every call returns at once. On a device `wait` only orders streams, the host goes on; on the CPU it blocks the host, and
there a hang would be unexplained without the loop. A single wait with the process group's own limit was rejected: it is
30 minutes, and its error names sockets, not units.

gloo has no reduce-scatter: torch implements it by an all-reduce on a copy of the input, and the returned work never
reports completion and ignores time limits (torch 2.13). So this file calls the same all-reduce itself, in place: the
sums are the same bit for bit, nothing is copied, and the wait can be watched. Under
`torch.use_deterministic_algorithms(True)` it exchanges the parts and adds them up from the last rank to the first, as
autograd adds what the losses of one process give.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.watchdog import Watchdog
from zeroshard.errors import ZeroShardError

_SHORT = timedelta(seconds=0.2)
_LEAST = timedelta(milliseconds=1)
"""c10d cuts limits to whole milliseconds and takes 0 for no limit at all."""

if TorchVersion(torch.__version__) >= "2.13":
    # The old names still work but warn on each call, which costs 40 microseconds.
    _all_gather, _reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    _all_gather, _reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

_KNOWN = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
)
"""Dtypes that all backends send; others are sent as bytes."""


class Pending:
    """A collective that was issued; `Collectives.wait` it before the data is used."""

    __slots__ = ("_event", "_finish", "_work", "kind", "unit")

    def __init__(
        self,
        kind: str,
        unit: str,
        work: dist.Work | None = None,
        finish: Callable[[], object] | None = None,
        event: torch.cuda.Event | None = None,
    ) -> None:
        self.kind, self.unit = kind, unit
        self._work, self._finish, self._event = work, finish, event

    @property
    def description(self) -> str:
        """'all-gather of unit X'."""
        return f"{self.kind} of unit {self.unit}"

    def is_completed(self) -> bool:
        """Whether the data has arrived; the caller still has to wait for it."""
        if self._event is not None:
            return self._event.query()
        work = self._work
        return work is None or work.is_completed()

    def mark(self, stream: torch.cuda.Stream) -> None:
        """Record the operation's end on `stream`, after it was ordered there. Does nothing on a CPU."""
        if self._event is not None:
            self._event.record(stream)

    def mark_here(self) -> None:
        """As `mark`, on the current stream."""
        if self._event is not None:
            self._event.record()

    def blocks_host(self) -> bool:
        """Whether a wait would hold the host up."""
        return self._event is None and not self.is_completed()

    def finish(self) -> None:
        """Wait without a limit. RuntimeError if the operation failed."""
        if self._work is not None:
            self._work.wait()
        self._done()

    def finish_within(self, limit: timedelta) -> bool:
        """Wait at most `limit`; True when done. RuntimeError if the operation failed."""
        assert self._work is not None, "nothing is outstanding"
        try:
            self._work.wait(max(limit, _LEAST))
        except RuntimeError:
            # Either the limit (the operation itself is unharmed) or a failure: then it is completed, and the second
            # wait raises it again. Telling them apart by the text would tie us to a torch version.
            if not self._work.is_completed():
                return False
            self._work.wait()
        self._done()
        return True

    def _done(self) -> None:
        self._work = None
        if self._finish is not None:
            self._finish, finish = None, self._finish
            finish()


class Collectives:
    """The collectives of one communicator. `group` is None on an axis of size 1: nothing is sent or logged then.

    Payload bytes as logged: all-gather its full output, reduce-scatter its full input, all-reduce and broadcast the
    tensor, all-to-all the number that the caller gives. All ranks of the group call the same methods in the same order.
    Operations outside of the lists are also recorded in `order`, the log that ranks compare. Otherwise two ranks that
    wait in different collectives would only look slow to each other.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        name: str,
        log: OperationLog,
        watchdog: Watchdog | None = None,
        order: OperationLog | None = None,
    ) -> None:
        self.name = name
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self._group = None if self.size == 1 else group
        self._log, self._watchdog, self._order = log, watchdog, order
        self._backends = "" if self._group is None else dist.get_backend_config(self._group)
        self._last: Pending | None = None
        self._event: torch.cuda.Event | None = None
        if watchdog is not None and self._group is not None:
            watchdog.watch(self._last_on_device)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, unit: str) -> Pending:
        """`out` (size * n) becomes the ranks' `shard` (n) in rank order; `shard` may be this rank's slice of `out`."""
        if self._group is None:
            if out.data_ptr() != shard.data_ptr():
                out.copy_(shard)
            return Pending("all-gather", unit)
        on_device = self._before("all-gather", unit, out)
        out, shard = _as_sent(out), _as_sent(shard)
        return self._issued("all-gather", unit, out, _all_gather(out, shard, group=self._group, async_op=not on_device))

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, unit: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Pending:
        """`shard` (n) becomes this rank's slice of the ranks' reduced `full` (size * n), which may hold it.

        The rest of `full` is undefined afterwards: backends without a reduce-scatter leave the other sums there.
        """
        if self._group is None:
            if full.data_ptr() != shard.data_ptr():
                shard.copy_(full)
            return Pending("reduce-scatter", unit)
        on_device = self._before("reduce-scatter", unit, full)
        if not self._is_gloo(full):
            work = _reduce_scatter(shard, full, op=op, group=self._group, async_op=not on_device)
            return self._issued("reduce-scatter", unit, full, work)
        if not on_device and op == dist.ReduceOp.SUM and torch.are_deterministic_algorithms_enabled():
            received = torch.empty_like(full)
            work = dist.all_to_all_single(
                received.view(-1).view(torch.uint8), full.view(-1).view(torch.uint8), group=self._group, async_op=True
            )
            parts = received.view(self.size, -1)
            return self._issued("reduce-scatter", unit, full, work, lambda: _add_up(parts, shard.view(-1)))
        n = shard.numel()
        mine = full.view(-1)[self.rank * n : (self.rank + 1) * n]
        work = dist.all_reduce(full, op=op, group=self._group, async_op=not on_device)
        aliased = mine.data_ptr() == shard.data_ptr()
        return self._issued(
            "reduce-scatter", unit, full, work, None if aliased else lambda: shard.copy_(mine.view_as(shard))
        )

    def all_reduce(self, tensor: torch.Tensor, unit: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """`tensor` becomes its reduction over the ranks, in place."""
        if self._group is None:
            return Pending("all-reduce", unit)
        on_device = self._before("all-reduce", unit, tensor)
        return self._issued(
            "all-reduce", unit, tensor, dist.all_reduce(tensor, op=op, group=self._group, async_op=not on_device)
        )

    def broadcast(self, tensor: torch.Tensor, src: int, unit: str) -> Pending:
        """`tensor` becomes that of rank `src` of this communicator."""
        if self._group is None:
            return Pending("broadcast", unit)
        on_device = self._before("broadcast", unit, tensor)
        work = dist.broadcast(_as_sent(tensor), group_src=src, group=self._group, async_op=not on_device)
        return self._issued("broadcast", unit, tensor, work)

    def all_to_all(
        self,
        out: torch.Tensor,
        data: torch.Tensor,
        out_splits: list[int],
        in_splits: list[int],
        unit: str,
        nbytes: int,
    ) -> Pending:
        """`out` becomes what each rank has for this one, in rank order; `data` is what this one has for each.

        Args:
            out_splits, in_splits: elements from and for each rank.
            nbytes: payload as logged, equal on all ranks although their sizes differ: the average of what they send.
        """
        if self._group is None:
            out.copy_(data)
            return Pending("all-to-all", unit)
        on_device = self._before("all-to-all", unit, data, nbytes)
        work = dist.all_to_all_single(out, data, out_splits, in_splits, group=self._group, async_op=not on_device)
        return self._issued("all-to-all", unit, data, work)

    def wait(self, pending: Pending) -> None:
        """Make the data usable: on the CPU the host waits, on a device the current stream does.

        Raises DivergenceError when the ranks turn out to have issued different collectives, and ZeroShardError naming
        the rank that left or died meanwhile.
        """
        watchdog = self._watchdog
        try:
            if watchdog is None or not pending.blocks_host():
                pending.finish()
                pending.mark_here()
                return
            with watchdog.waiting(pending.description):
                while not pending.finish_within(_SHORT):
                    watchdog.raise_if_failed()
        except RuntimeError as error:
            if isinstance(error, ZeroShardError):
                raise
            if watchdog is None:
                where = f"rank {self.rank} of {self.name}"
                raise ZeroShardError(f"{pending.description} failed on {where}: {error}") from error
            raise watchdog.explain_failure(pending.description, error) from error

    def _before(self, kind: str, unit: str, payload: torch.Tensor, nbytes: int | None = None) -> bool:
        """Log the operation; whether it runs on a device, in the order of the current stream."""
        nbytes = payload.nbytes if nbytes is None else nbytes
        if self._watchdog is not None and self._watchdog.error is not None:
            self._watchdog.raise_if_failed()
        self._log.record(kind, unit, nbytes)
        if self._order is not None:
            self._order.record(kind, unit, nbytes)
        return payload.is_cuda

    def _issued(
        self,
        kind: str,
        unit: str,
        payload: torch.Tensor,
        work: dist.Work | None,
        finish: Callable[[], object] | None = None,
    ) -> Pending:
        if not payload.is_cuda:
            return Pending(kind, unit, work, finish)
        # c10d has issued it on the current stream, so there is no work to wait for. The watchdog needs its end: one
        # event for all operations, since only the last one is checked; the caller records it on the right stream.
        # Operations in a captured graph have not run; the replay is watched as a whole.
        if torch.cuda.is_current_stream_capturing():
            return Pending(kind, unit, work, finish)
        self._event = self._event or torch.cuda.Event()
        self._last = Pending(kind, unit, work, finish, self._event)
        return self._last

    def _last_on_device(self) -> Pending | None:
        return self._last

    def _is_gloo(self, tensor: torch.Tensor) -> bool:
        return f"{tensor.device.type}:gloo" in self._backends


def _add_up(parts: torch.Tensor, out: torch.Tensor) -> None:
    """The sum of (ranks, n), from the last rank to the first."""
    with torch.no_grad():
        out.copy_(parts[-1])
        for part in reversed(parts[:-1].unbind()):
            out.add_(part)


def gather_over_default(out: torch.Tensor, part: torch.Tensor) -> None:
    """All-gather over the default group, for what no sharded model owns; waits for it."""
    _all_gather(_as_sent(out), _as_sent(part))


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in a dtype that all backends send."""
    return tensor if tensor.dtype in _KNOWN else tensor.view(torch.uint8)
