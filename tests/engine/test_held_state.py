"""What nodes hold in memory is what a checkpoint of that step would be, at any number of ranks, or it is not used."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.elastic.place import ROUND_VARIABLE, SOCKET_VARIABLE, Place
from zeroshard.elastic.session import Session, set_session
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.saving.holding import has_copy_elsewhere, next_memory_server
from zeroshard.launch.elastic.gate import Gate
from zeroshard.launch.elastic.memory_server import MemoryServer

_STEPS = 3


class _Node:
    """A node of one rank, in the process of that rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.memory_server = MemoryServer()
        self.memory_server.token = "secret"
        folder = directory / f"node-{rank}"
        folder.mkdir()
        self.gate = Gate(folder, 1, lambda: None, self.memory_server)
        os.environ.update({SOCKET_VARIABLE: str(self.gate.path), "LOCAL_RANK": "0"})

    def begin(self, number: int, addresses: list[tuple[str, int]]) -> Session:
        """A round of the ranks of the process group, each on its own node; `addresses`: its memory servers first."""
        rank, size = dist.get_rank(), dist.get_world_size()
        nowhere = ("", 0)
        memory_servers = tuple(addresses)
        place = Place(number, rank, size, rank, size, nowhere, nowhere, True, "", (1,) * size, memory_servers, "secret")
        session = Session(place, stays=True)
        set_session(session)
        return session

    def flip(self, version: int, *, own: bool) -> None:
        """A bit of an image of a step turns over in memory."""
        for image in self.memory_server._images.values():
            if image.version[1] == version and image.own is own:
                at = image.nbytes // 2
                byte = os.pread(image.descriptor, 1, at)[0]
                os.pwrite(image.descriptor, bytes([byte ^ 1]), at)


def _engine(shard: int | None, directory: Path | None = None) -> Any:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.ReLU(), torch.nn.Linear(24, 1))
    zero: dict[str, Any] = {"stage": 3}
    if shard is not None:
        zero["mics_shard_size"] = shard
    config = {
        "train_batch_size": 12,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}},
        "zero_optimization": zero,
        "checkpoint": {"memory_steps": 1, **({} if directory is None else {"directory": str(directory)})},
    }
    data = torch.utils.data.TensorDataset(torch.randn(96, 8))
    return zeroshard.initialize(model=model, config=config, training_data=data)


def _train(made: Any, steps: int) -> list[list[float]]:
    """The samples of `steps` steps, as they are read."""
    engine, _, loader, _ = made
    seen: list[list[float]] = []
    last = engine.global_steps + steps
    while engine.global_steps < last:
        for (values,) in loader:
            seen += values[:, :1].tolist()
            loss = (engine(values) - values.sum(1, keepdim=True)).square().mean()
            engine.backward(loss)
            engine.step()
            if engine._holding is not None:
                engine._holding.finish()  # else a version is passed over while the one before is made
            if engine.global_steps == last:
                break
    return seen


def _state(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in zeroshard.full_state_dict(engine.module).items()}


def _lost(rank: int, size: int, directory: str, shard: int | None, damage: str) -> tuple[Any, ...] | None:
    """Ranks train on nodes of their own, the last node is lost, and the others go on."""
    base = Path(directory)
    node = _Node(base, rank)
    ports: list[Any] = [None] * size
    dist.all_gather_object(ports, node.memory_server.port)
    addresses = [("127.0.0.1", port) for port in ports]
    session = node.begin(0, addresses)
    engine, *_ = made = _engine(shard)
    twins = has_copy_elsewhere(handle_of(engine.module), session.place)
    _train(made, _STEPS)
    dist.barrier()
    held = sorted((image.version[1], image.own) for image in node.memory_server._images.values())
    engine.save_checkpoint(base / "disk")
    dist.barrier()
    session.end()
    session.close()
    set_session(None)
    dist.destroy_process_group()
    if rank == size - 1:
        node.memory_server.close()
        return None
    if damage == "a replica" and rank == 0:
        node.flip(_STEPS, own=True)
    if damage == "all of the newest":
        node.flip(_STEPS, own=True)
        node.flip(_STEPS, own=False)
    left = size - 2 if shard is not None else size - 1
    if rank >= left:  # a spare: its memory stays
        end = time.monotonic() + 60
        while not (base / "done").exists() and time.monotonic() < end:
            time.sleep(0.01)
        node.memory_server.close()
        return None
    store = dist.FileStore(str(base / "store"), left)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=left)
    session = node.begin(1, addresses[:left] + addresses[left:-1])
    engine, *_ = made = _engine(shard)
    folder, _ = engine.resume()
    steps = engine.global_steps
    samples = _train(made, 2)
    state = _state(engine)
    session.end()
    session.close()
    set_session(None)
    reference, *_ = other = _engine(shard, base / "disk")
    reference.resume()
    expected_samples = _train(other, 2)
    expected = _state(reference)
    reference.destroy()
    dist.barrier()
    (base / "done").touch()
    node.memory_server.close()
    equal = all(torch.equal(state[name], value) for name, value in expected.items())
    return twins, held, folder, steps, samples == expected_samples, equal


@pytest.mark.parametrize(
    ("shard", "damage"), [(None, ""), (None, "a replica"), (2, ""), (2, "a replica"), (None, "all of the newest")]
)
def test_the_rest_go_on_from_memory_bit_for_bit_as_from_a_checkpoint(
    tmp_path: Path, shard: int | None, damage: str
) -> None:
    done = [result for result in run_ranks(4, _lost, str(tmp_path), shard, damage) if result is not None]
    assert len(done) == (2 if shard else 3)
    for twins, held, folder, steps, same_samples, equal in done:
        assert twins is (shard is not None)
        # Two versions: the newest, and the one before until all are known to have the newest.
        assert {step for step, own in held if own} == {_STEPS - 1, _STEPS}
        assert {step for step, own in held if not own} == (set() if twins else {_STEPS - 1, _STEPS})
        if damage == "all of the newest":
            assert steps == _STEPS - 1
            continue
        assert (steps, same_samples, equal) == (_STEPS, True, True), folder
        assert folder == f"step {_STEPS} of round 0 in memory"


def test_the_next_node_of_the_round_holds_the_copies() -> None:
    nowhere = ("", 0)
    memory_servers = (("a", 1), ("b", 2), ("spare", 3))
    place = Place(0, 2, 4, 1, 2, nowhere, nowhere, counts=(2, 2), memory_servers=memory_servers)
    assert next_memory_server(place) == ("a", 1)
    alone = Place(0, 0, 2, 0, 1, nowhere, nowhere, counts=(2,), memory_servers=memory_servers[:1])
    assert next_memory_server(alone) is None
    assert ROUND_VARIABLE not in os.environ
