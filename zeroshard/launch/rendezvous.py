"""Finds this node's place in its job if each node is started separately: from options, else from the environment.

    --nnodes 2 --node-rank 1 --master-addr a        by hand, or by a script
    PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=a  torchrun's variables, always read
    --rendezvous kubernetes | slurm | openmpi       the variables of a pod, a step, an mpirun

Slurm's and MPI's are read only when asked for: inside an sbatch script a plain `zeroshard run` means this node alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from zeroshard import cluster
from zeroshard.cluster import NodePlace
from zeroshard.errors import UsageError


class Rendezvous(str, Enum):
    """Which variables of the environment are read."""

    ENV = "env"
    KUBERNETES = "kubernetes"
    SLURM = "slurm"
    OPENMPI = "openmpi"


_READ = {
    Rendezvous.ENV: cluster.torchrun_node,
    Rendezvous.KUBERNETES: cluster.kubernetes_node,
    Rendezvous.SLURM: cluster.slurm_node,
    Rendezvous.OPENMPI: cluster.openmpi_node,
}


def place_in_environment(rendezvous: Rendezvous, environ: Mapping[str, str]) -> NodePlace:
    """This node's place as the environment says; None for what it does not say."""
    return _READ[rendezvous](environ)


def find_place(given: NodePlace, rendezvous: Rendezvous, environ: Mapping[str, str]) -> NodePlace:
    """`given`, completed from the environment and by defaults. Raises UsageError for a place that is impossible."""
    in_environment = place_in_environment(rendezvous, environ)
    if in_environment.nnodes is not None and given.nnodes is not None and given.nnodes != in_environment.nnodes:
        raise UsageError(
            f"--nnodes {given.nnodes}: the environment says {in_environment.nnodes} nodes; leave the option out"
        )
    place = NodePlace(
        nnodes=_first(given.nnodes, in_environment.nnodes, 1),
        node_rank=_first(given.node_rank, in_environment.node_rank, 0),
        master_addr=given.master_addr or in_environment.master_addr,
        master_port=_first(given.master_port, in_environment.master_port),
        nproc=given.nproc or in_environment.nproc,
    )
    assert place.nnodes is not None
    assert place.node_rank is not None
    if place.nnodes > 1 and place.master_addr is None:
        raise UsageError(f"--nnodes {place.nnodes}: the nodes meet at node 0; give its address as --master-addr")
    if place.node_rank >= place.nnodes:
        raise UsageError(
            f"--node-rank {place.node_rank}: with --nnodes {place.nnodes} it is from 0 to {place.nnodes - 1}"
        )
    return place


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
