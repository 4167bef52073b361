"""`plan="auto"`: measures the free memory of all ranks, lets the planner choose one plan, and logs the reason.

    every rank    free bytes of device and host  --minimum-->  rank 0 traces and chooses  --broadcast-->  all ranks

Only rank 0 traces, because ranks that choose separately could differ. Its errors are broadcast, too, so that all ranks
raise the same error and none waits.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.arguments import need_kind
from zeroshard.comm.mesh import world_size
from zeroshard.comm.reach import gpus_reachable
from zeroshard.engine.memory.host_memory import available_bytes
from zeroshard.errors import PlanError, UsageError, ZeroShardError
from zeroshard.plan.builder import Recipe
from zeroshard.planner.choose.startup import Decision, Example, FreeMemory, MakePlan, decide
from zeroshard.planner.machine.hardware import Cluster, find_gpu, parse_cluster
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.meta_copy import meta_copy
from zeroshard.planner.trace.sources import guessed_batch
from zeroshard.sharding.dtensors import holder_of
from zeroshard.sharding.units import UnitSpec

_LOGGER = logging.getLogger("zeroshard")
COMMUNICATORS = 2**29
"""Device bytes reserved for the communicators, which are made later. An assumption."""
HOST_KEPT_FREE = 2 * 2**30
DEFAULT_TOKENS = 4096
"""Tokens per sequence if the length is not given; fewer if the model takes fewer."""
OFFLOADS = (Offload.NONE, Offload.CPU, Offload.CPU_PARAM)


@dataclass(frozen=True)
class AutoPlan:
    """Let the planner choose stage and offload by the memory that is free. `plan="auto"` is AutoPlan().

    Attributes:
        recipe: all other choices; the planner sets its sharding and its offload, with the offloaded share.
        example: one micro-batch as the forward takes it, to trace activations: a mapping of keyword arguments, a
            tuple of positional ones, or a tensor. It may be on any device; its values are not read.
        device_memory: bytes to use of each device; None for all free memory (on a CPU, of the machine).
        offload: whether host memory may be used if nothing fits without it. On a CPU it needs `device_memory`.
    """

    recipe: Recipe = field(default_factory=Recipe)
    example: Any = None
    device_memory: float | None = None
    offload: bool = True

    def __post_init__(self) -> None:
        need_kind(self.recipe, Recipe, "AutoPlan(recipe=)", "a Recipe")
        need_kind(self.offload, bool, "AutoPlan(offload=)", "True or False")
        memory = self.device_memory
        if memory is None:
            return
        if not isinstance(memory, Real) or isinstance(memory, bool) or not 1 <= memory < float("inf"):
            raise PlanError(f"AutoPlan(device_memory={memory!r}): a number of bytes, 1 or more")


def example_of(batch: Any) -> Example | None:
    """A batch as arguments of the forward."""
    if batch is None or isinstance(batch, Example):
        return batch
    if isinstance(batch, Mapping):
        return Example((), dict(batch))
    return Example(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})


def assumed_example(model: nn.Module, samples: int, length: int | None) -> Example | None:
    """An assumed micro-batch for a model that takes token ids or is of transformers; None for other models."""
    config: Any = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    tokens = length or min(DEFAULT_TOKENS, limit if isinstance(limit, int) else DEFAULT_TOKENS)
    try:
        with torch.device("meta"):
            batch = guessed_batch(meta_copy(model), type(model).__name__, samples, tokens)
    except (ZeroShardError, AttributeError, TypeError, ValueError):
        return None
    found = "" if length else ", as nobody found how long they are"
    return Example((), dict(batch), f"{samples} sequences of {tokens} tokens{found}")


def choose(
    model: nn.Module,
    units: list[UnitSpec],
    make: MakePlan,
    example: Example | None,
    device: torch.device,
    *,
    limit: float | None = None,
    offloads: Sequence[Offload] = OFFLOADS,
    share: float | None = None,
) -> Decision:
    """The choice of all ranks; called by all of them.

    Args:
        offloads, share: see `decide`.

    Raises:
        PlanError: nothing fits, with the cheapest change; on every rank.
    """
    room = _free_on_ranks(model, device, limit)
    decision: Decision | None = None
    found: dict[str, Any] = {}
    cause: Exception | None = None
    if _rank() == 0:
        try:
            decision = decide(model, units, make, room, example, offloads=tuple(offloads), share=share)
            found = {"stage": decision.stage, "offload": decision.offload.value, "share": decision.share}
            found["reason"] = decision.reason
        except ZeroShardError as error:
            found = {"error": str(error)}
        except Exception as error:  # of any kind, since the other ranks wait for the broadcast
            cause, found = error, {"error": f"auto: {type(error).__name__}: {error}"}
    found = _broadcast_json(found, device)
    if "error" in found:
        raise PlanError(found["error"]) from cause
    decision = Decision(int(found["stage"]), Offload(found["offload"]), str(found["reason"]), float(found["share"]))
    if _rank() == 0:
        _LOGGER.info("auto: %s", decision.reason)
    return decision


def reachable(device: torch.device) -> bool:
    """Whether plans may copy between peers on these ranks; called by all ranks before `choose`."""
    return device.type == "cuda" and gpus_reachable(device)


def _free_on_ranks(model: nn.Module, device: torch.device, limit: float | None) -> FreeMemory:
    """The least free memory of any rank."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size())))
    free = available_bytes()
    host = 0 if free is None else max(0, free - HOST_KEPT_FREE) // max(1, local)
    own, cluster = _free(model, device, limit, host)
    if device.type != "cuda" and limit is None:
        host = 0  # the device is the host, so there is nothing to offload to
    least = torch.tensor([own, host], dtype=torch.int64, device=device)
    if world_size() > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    own, host = least.tolist()
    return FreeMemory(own, host, world_size(), device.type == "cuda", cluster)


def _free(model: nn.Module, device: torch.device, limit: float | None, host: int) -> tuple[int, Cluster | None]:
    """Bytes that this rank may use, and the cluster if the planner knows its rates."""
    if device.type != "cuda":
        free = int(limit) if limit is not None else host
        if free <= 0:
            raise UsageError("auto: this machine does not tell what memory is free; give AutoPlan(device_memory=...)")
        return free, None
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    held = [holder_of(parameter) for parameter in model.parameters()]
    given_back = sum({part.data_ptr(): part.nbytes for part in held if part.device == device}.values())
    free += idle + given_back - (COMMUNICATORS if world_size() > 1 else 0)
    try:
        card = find_gpu(torch.cuda.get_device_name(device))
    except PlanError:
        return int(min(free, limit or free)), None
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "8"))
    per_node = per_node if world_size() % per_node == 0 else 1
    return int(min(free, limit or free)), parse_cluster(f"{world_size()}x{card.name}", per_node=per_node)


def _broadcast_json(found: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Rank 0's answer, on every rank; sent as JSON in a tensor."""
    if world_size() == 1:
        return found
    text = json.dumps(found).encode()
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(length, 0)
    payload = torch.zeros(int(length), dtype=torch.uint8)
    if _rank() == 0:
        payload = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    payload = payload.to(device)
    dist.broadcast(payload, 0)
    return json.loads(bytes(payload.tolist()))


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
