"""Measured steps of the engine, from `data/measured.tsv`, to which predictions are compared."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.planner.machine.hardware import read_table


@dataclass(frozen=True)
class Measured:
    """One measured row; `stage` None is forward and backward alone, without an engine; other None were not measured.

    Attributes:
        model: a size of the GPU benchmarks' model.
        samples, length: sequences of the micro-batch, and tokens of each.
        tuned: all units may stay gathered from forward to backward.
        offload: none, or how state in host memory is updated (streamed, processor), or param: parameters there too.
        commit, where: the code that was measured, and the page that has the measurement.
    """

    model: str
    stage: int | None
    samples: int
    length: int
    checkpointing: bool
    tuned: bool
    offload: str
    seconds: float | None
    allocated_gib: float | None
    reserved_gib: float | None
    commit: str
    where: str

    @property
    def label(self) -> str:
        batch = f"{self.samples} x {self.length}"
        return row_label(self.model, self.stage, batch, self.checkpointing, self.tuned, self.offload)


def row_label(model: str, stage: int | None, batch: str, checkpointing: bool, tuned: bool, offload: str) -> str:
    """A configuration in words, for tables; arguments as in Measured."""
    parts = [model, "floor" if stage is None else f"stage {stage}", batch]
    parts += ["checkpointing"] * checkpointing + ["all kept gathered"] * tuned
    return ", ".join([*parts, *([f"offload {offload}"] if offload != "none" else [])])


def _number(text: str) -> float | None:
    return float(text) if text else None


MEASURED = tuple(
    Measured(
        model=row["model"],
        stage=int(row["stage"]) if row["stage"] else None,
        samples=int(row["samples"]),
        length=int(row["length"]),
        checkpointing=row["checkpointing"] == "yes",
        tuned=row["tuned"] == "yes",
        offload=row["offload"],
        seconds=_number(row["seconds"]),
        allocated_gib=_number(row["allocated_gib"]),
        reserved_gib=_number(row["reserved_gib"]),
        commit=row["commit"],
        where=row["where"],
    )
    for row in read_table("measured.tsv")
)
