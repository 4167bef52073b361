"""Real text for the benchmarks whose losses have to fall: the bytes of Python's own help topics."""

from __future__ import annotations

import pydoc_data.topics

import torch
import torch.distributed as dist

from benchmarks.setting import MicroBatch


class Text:
    """Gives this rank's next micro-batch, int64 (batch, length) twice; the sequence is the same for every engine."""

    def __init__(self, batch: int, length: int, device: torch.device) -> None:
        text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
        self.data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        self.batch, self.length, self.device = batch, length, device
        self.generator = torch.Generator().manual_seed(1000 + dist.get_rank())

    def take(self) -> MicroBatch:
        starts = torch.randint(len(self.data) - self.length, (self.batch, 1), generator=self.generator)
        rows = self.data[starts + torch.arange(self.length + 1)].to(self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
