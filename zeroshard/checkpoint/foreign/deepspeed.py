"""Opens a checkpoint folder of DeepSpeed (0.19), ZeRO stages 1 to 3 or universal.

    DIR/latest                                            the newest tag
    DIR/TAG/mp_rank_00_model_states.pt                    stages 1, 2: model, names and shapes in flat order, counters
    DIR/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt     stage 3: the same, of rank R
    DIR/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's part of each flat group
    DIR/TAG/*_mp_rank_01_*                                tensor-parallel parts: see `deepspeed_tensors`
    DIR/TAG/layer_LL-[model_YY-]model_states.pt           pipelines, of tensor-parallel ranks: see `deepspeed_stages`
    DIR/TAG/layer_L_expert_E_mp_rank_00_model_states.pt   experts: see `deepspeed_experts`
    DIR/TAG/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt   universal: a parameter a folder, whole

This module recognises the folder; `deepspeed_common` reads what all kinds share, `deepspeed_flat` and
`deepspeed_universal` find the place of each parameter. Rejected: loading all files of all ranks and concatenating them,
as DeepSpeed does, which takes memory for the whole optimizer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroshard.checkpoint.foreign.contents import Contents
from zeroshard.checkpoint.foreign.deepspeed_common import Common, Files
from zeroshard.checkpoint.foreign.deepspeed_experts import FILE as EXPERT
from zeroshard.checkpoint.foreign.deepspeed_flat import open_flat
from zeroshard.checkpoint.foreign.deepspeed_layers import LAYER
from zeroshard.checkpoint.foreign.deepspeed_stages import is_pipeline, open_stages
from zeroshard.checkpoint.foreign.deepspeed_tensors import INFO, Info, check_ranks, open_tensor_parts
from zeroshard.checkpoint.foreign.deepspeed_universal import check_all_used, open_universal
from zeroshard.errors import CheckpointError

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_UNSUPPORTED = (
    (re.compile(r"layer_\d+_expert_\d+_.*"), "experts beside tensor parallelism"),
    (re.compile(r"expp_rank_.*"), "experts and an optimizer without ZeRO"),
    (re.compile(r"layer_\d+-.+-model_states\.pt"), "layers of other axes than pipe, data and model"),
)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,200}")


def find(directory: str | os.PathLike[str], tag: str | None = None) -> Path | None:
    """The folder of a DeepSpeed checkpoint: `directory` itself or that of a tag in it; None if there is none.

    Raises:
        CheckpointError: `latest` names something outside of the folder.
    """
    base = Path(directory)
    if tag is None and _looks_right(base):
        return base
    for pointer in ("latest", "latest_universal"):
        file = base / pointer
        if tag is None and file.is_file():
            if file.stat().st_size > 1024:
                raise CheckpointError(f"{file} is too long for a tag")
            tag = file.read_text(errors="replace").strip()
            if not _TAG.fullmatch(tag):
                raise CheckpointError(
                    f"{file} names {tag[:80]!r}, which is no folder beside it; give --tag, or a tag's folder"
                )
            if not (base / tag).is_dir():
                raise CheckpointError(
                    f"{file} names {tag!r}, but there is no such folder beside it; give --tag, or the folder of a tag"
                )
    if tag is None:
        return None
    folder = base / check_tag(tag, base)
    return folder if _looks_right(folder) else None


def check_tag(tag: str, base: Path) -> str:
    """The tag, if it is the name of a folder in `base`. Raises CheckpointError for other paths."""
    if not _TAG.fullmatch(tag):
        raise CheckpointError(f"tag {tag[:80]!r} is no folder of {base}")
    return tag


def _looks_right(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    names = os.listdir(folder)
    model = any(_MODEL.fullmatch(name) for name in names)
    return model and ("zero" in names or any(_OPTIM.fullmatch(name) for name in names))


def open_deepspeed(folder: Path, info: Info | None = None, *, masters_differ: bool = False) -> Contents:
    """The contents of a checkpoint folder that `find` returned; of tensors it reads names, shapes and some starts only.

    Args:
        info: what to use in place of the checkpoint's own `universal_checkpoint_info`; None for that.
        masters_differ: take master weights though they do not round to the weights of the model files.

    Raises:
        CheckpointError: files are missing, damaged or malicious, or have content that is not imported.
    """
    found = _Found.of(folder, masters_differ)
    parts = found.parts()
    divided = len(parts) > 1 or bool(found.layers)
    if divided and found.experts:
        raise CheckpointError(f"{folder}: experts beside pipeline stages or tensor-parallel ranks are not imported")
    if info is not None and max(len(found.layers), 1 if found.layers else len(parts)) < 2:
        raise CheckpointError(
            f"{folder} has no tensor-parallel ranks, so it has no use for another {INFO}; leave it out"
        )
    contents = _open(found, parts, info)
    if found.universal:
        check_all_used(folder / "zero", contents)
    return contents


def _open(found: _Found, parts: Sequence[Files], info: Info | None) -> Contents:
    """The contents of all model-parallel ranks."""
    divided = len(parts) > 1 or bool(found.layers)
    if found.layers or ((divided or found.universal) and is_pipeline(parts[0])):
        return open_stages(parts, found.layers, info)
    if divided:
        return open_tensor_parts(parts, info)
    common = Common.read(parts[0])
    check_ranks(common, 1)
    return open_universal(parts[0], common) if found.universal else open_flat(parts[0], common)


@dataclass(frozen=True)
class _Found:
    """The files of a folder, by model-parallel rank (pipeline stages are such) and by data-parallel rank."""

    folder: Path
    model: dict[int, dict[int, Path]]
    optim: dict[int, dict[int, Path]]
    layers: dict[int, dict[int, Path]]
    experts: dict[int, dict[int, Path]]
    universal: bool
    differ: bool

    @staticmethod
    def of(folder: Path, differ: bool) -> _Found:
        names = sorted(os.listdir(folder))
        universal = "zero" in names and (folder / "zero").is_dir()
        found = _Found(folder, {}, {}, {}, {}, universal, differ)
        for name in names:
            found._take(name)
        return found

    def _take(self, name: str) -> None:
        if match := LAYER.fullmatch(name):
            number, of_rank = int(match[1]), self.layers.setdefault(int(match[2] or 0), {})
            if number in of_rank:
                raise CheckpointError(f"{self.folder} holds layer {number} twice: {of_rank[number].name} and {name}")
            of_rank[number] = self.folder / name
            return
        if match := EXPERT.fullmatch(name):
            self.experts.setdefault(int(match[1]), {})[int(match[2])] = self.folder / name
            return
        for pattern, what in _UNSUPPORTED:
            if pattern.fullmatch(name):
                raise CheckpointError(f"{self.folder / name}: DeepSpeed checkpoints with {what} are not imported")
        for pattern, files in ((_MODEL, self.model), (_OPTIM, self.optim)):
            match = pattern.fullmatch(name)
            if match is None:
                continue
            rank, own = int(match[1] or 0), files.setdefault(int(match[2]), {})
            if rank in own:
                raise CheckpointError(f"{self.folder} holds two files of rank {rank}: {own[rank].name} and {name}")
            own[rank] = self.folder / name

    def parts(self) -> list[Files]:
        """The files of each model-parallel rank. Raises CheckpointError if the first ones of one are missing."""
        return [self._files(part) for part in range(max((*self.model, *self.optim)) + 1)]

    def _files(self, part: int) -> Files:
        model, optim = self.model.get(part, {}), self.optim.get(part, {})
        if 0 not in model or not (optim or self.universal):
            name = f"mp_rank_{part:02d}_{'optim' if 0 in model else 'model'}_states.pt"
            raise CheckpointError(f"{self.folder} holds no ZeRO checkpoint: the files of rank 0 are missing (*{name})")
        return Files(self.folder, model, optim, self.universal, self.experts, self.differ)
