"""Communication between pipeline stages: communicators over the axis `pp`, and over all ranks of all stages.

    8 ranks, pp 2 x dp_shard 4         the ranks of a stage        across: those of all stages at one place
        stage 0    0 1 2 3             {0 1 2 3}                   {0 4} {1 5} {2 6} {3 7}
        stage 1    4 5 6 7             {4 5 6 7}

Each stage has its own mesh, plan, engine and operation log, which its ranks compare; ranks of other stages issue other
operations. Operations of all stages together (a step's statistics, saves and loads) have a separate log, which all
ranks compare. Rejected: one plan over all stages, in which every rank has parameters of other stages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.mesh import build_mesh, new_groups
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.together import gather_from_all
from zeroshard.comm.watchdog import Watchdog
from zeroshard.errors import PlanError
from zeroshard.mesh import STAGES, Axes, Mesh

_LABEL = "(pipeline stages)"
_LONGEST = 4096
"""Bytes for the names of a stage's axes."""


@dataclass(frozen=True)
class StagePlace:
    """The place of a rank among pipeline stages.

    Attributes:
        whole: the mesh of all ranks.
        rank: this rank's number in it.
    """

    whole: Mesh
    rank: int

    @property
    def index(self) -> int:
        """The number of this rank's stage."""
        return self.whole.position(self.rank, (STAGES,))

    @property
    def count(self) -> int:
        """How many stages there are."""
        return self.whole.size((STAGES,))

    @property
    def own(self) -> Mesh:
        """The mesh of this rank's stage."""
        return self.whole.of_stage()


def find_stage(mesh: Mesh) -> StagePlace | None:
    """This rank's place among the stages of a mesh; None where the mesh has one stage.

    Raises:
        PlanError: the mesh is for another number of ranks.
    """
    if STAGES not in mesh.names or mesh.size((STAGES,)) == 1:
        return None
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if mesh.world_size != size:
        raise PlanError(f"the mesh {mesh} is for {mesh.world_size} ranks, but there are {size}")
    return StagePlace(mesh, rank)


def axes_of_all(own: Sequence[Axes], device: torch.device) -> list[Axes]:
    """The axes over which any stage needs communicators, in one order; called by all ranks of all stages.

    Every rank makes every communicator, even over axes that only other stages use.
    """
    content = json.dumps(own).encode()
    if len(content) > _LONGEST:
        raise PlanError(f"the mesh has too many axes to tell the other pipeline stages of: {len(content)} bytes")
    told = torch.frombuffer(bytearray(content.ljust(_LONGEST)), dtype=torch.uint8).to(device)
    texts = gather_from_all(told, "shard() of pipeline stages", "all ranks call it")
    found = {tuple(axes) for text in texts for axes in json.loads(bytes(text.cpu().tolist()).decode())}
    return sorted(found)


class Stages:
    """The communicators of all stages; made by all ranks together.

    Attributes:
        place: where this rank stands.
        everyone: all ranks of all stages.
        across: the ranks at this rank's place in each stage, in the order of the stages.
        log: what all ranks issue together.
    """

    def __init__(self, place: StagePlace, device: torch.device, sent: OperationLog) -> None:
        self.place = place
        self._device, self._sent = device, sent
        self._mesh = build_mesh(place.whole, [(STAGES,)])
        self.log = OperationLog()
        self.store = self._mesh.store()
        self.watchdog = Watchdog(self.store, place.rank, place.whole.world_size, self.log, name="zeroshard stages")
        control = self._mesh.over(place.whole.names).control
        self.everyone = Collectives(control, "all stages/control", sent, self.watchdog, self.log)
        self.across = Collectives(
            self._mesh.over((STAGES,)).control, f"{STAGES}/control", sent, self.watchdog, self.log
        )
        self._made: list[dist.ProcessGroup] = []

    @property
    def neighbours(self) -> dist.ProcessGroup:
        """The communicator over which activations and their gradients go from stage to stage."""
        group = self._mesh.over((STAGES,)).gather
        assert group is not None
        return group

    def tied_group(self, stages: Sequence[int]) -> Collectives:
        """A communicator of the ranks at this rank's place in some of the stages; made by all ranks in one order.

        A rank of another stage gets one of itself alone.
        """
        places = self.place.whole.groups((STAGES,))
        partition = [tuple(ranks[stage] for stage in stages) for ranks in places]
        made = new_groups(f"tied stages {' '.join(map(str, stages))}", partition, self.place.rank)
        if made is not None:
            self._made.append(made)
        return Collectives(made, f"{STAGES}/tied", self._sent, self.watchdog)

    def gather_text(self, text: str) -> list[str]:
        """Gather a text from the rank at this place of each stage, in the order of the stages; called by all ranks."""
        content = text.encode()
        count, device = self.across.size, self._device
        length = torch.tensor([len(content)], dtype=torch.int64, device=device)
        lengths = torch.zeros(count, dtype=torch.int64, device=device)
        self.across.wait(self.across.all_gather(lengths, length, _LABEL))
        longest = max(int(lengths.max()), 1)
        told = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
        received = torch.empty(count * longest, dtype=torch.uint8, device=device)
        self.across.wait(self.across.all_gather(received, told, _LABEL))
        texts = received.cpu().view(count, longest)
        return [bytes(texts[stage, : int(lengths[stage])].tolist()).decode() for stage in range(count)]

    def add_statistics(self, values: torch.Tensor, size: int) -> None:
        """Make the statistics of a stage's step those of all stages: sum of squares, and whether ranks diverged.

        Args:
            values: squared norm, and sum and sum of squares of digests over the `size` ranks of this stage.
        """
        diverged = values[2] * size != values[1].square()
        pair = torch.stack((values[0], diverged.double()))
        self.across.wait(self.across.all_reduce(pair, "(step of all stages)"))
        values[0] = pair[0]
        values[2] += pair[1]  # digests that differ in any stage count as a difference in this one

    def made(self) -> list[dist.ProcessGroup]:
        """The communicators that were made here."""
        return [*self._made, *self._mesh.made()]

    def close(self, *, idle: bool) -> None:
        """Stop the watchdog, and destroy the communicators where nothing is under way."""
        self.watchdog.close()
        if not idle or not dist.is_initialized():
            return
        for group in self._made:
            dist.destroy_process_group(group)
        self._made.clear()
        self._mesh.destroy()
