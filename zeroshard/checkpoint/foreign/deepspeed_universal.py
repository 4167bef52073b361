"""Reads a universal checkpoint of DeepSpeed, which has a folder per parameter.

    zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt   the whole tensor, possibly flat, or {"param": tensor}
    zero/NAME/step.pt                              some versions
    zero/optimizer_state.pt                        hyper-parameters and loss scale

Tensor-parallel ranks and pipeline stages are joined there, but `mp_rank_MM_model_states.pt` tells the shapes that each
rank had. The layers' files of pipelines are not copied, so that the forward's dtype, buffers and frozen weights are
missing. DeepSpeed's converter also writes buffers, aliases and frozen parameters into such folders, in fp32; they are
read from the model file, which has them in their own dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zeroshard.checkpoint.foreign.contents import Contents, Parameter
from zeroshard.checkpoint.foreign.deepspeed_common import Common, Files, mapping, scaler_of, step_count
from zeroshard.checkpoint.foreign.deepspeed_flat import WEIGHT, RankState, frozen_3, groups_of, open_flat
from zeroshard.checkpoint.foreign.stored import Joined, Lazy, Piece, StoredTensor, numel
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.errors import CheckpointError


def open_rank(files: Files, common: Common, parts: int) -> Contents:
    """The contents of one model-parallel rank: of a universal checkpoint, or its part of another one.

    Args:
        parts: the number of tensor-parallel ranks.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    return open_universal(files, common, parts) if files.universal else open_flat(files, common)


def open_universal(files: Files, common: Common, parts: int = 1) -> Contents:
    """The contents of a universal checkpoint; of several `parts`, trained parameters are whole, others are not."""
    folder = files.folder / "zero"
    path = folder / "optimizer_state.pt"
    state = RankState(path, mapping(load(path), path, "the content"))
    stage = state.stage
    left_out: list[str] = []
    steps = _steps(state, stage)
    parameters: dict[str, Parameter] = {}
    for index, shapes in enumerate(common.shapes):
        for name, shape in shapes.items():
            parameters[name] = _parameter(folder, name, shape, steps.get(index), common, parts)
        _check_group([parameters[name] for name, shape in shapes.items() if numel(shape)], folder)
    if stage == 3:
        parameters |= frozen_3(files, common, len(files.model))
        left_out += common.absent(parameters)
    else:
        parameters |= common.whole_frozen(left_out)
    return common.contents(
        f"DeepSpeed {common.state.get('ds_version')}, universal, from ZeRO stage {stage}",
        parameters,
        left_out,
        groups=groups_of(state.state.get("param_groups"), common, stage, left_out),
        scaler=scaler_of(state.state.get("loss_scaler")),
    )


def _steps(state: RankState, stage: int) -> dict[int, float | None]:
    """The number of updates by flat group, if the converter stored them in the common file (stage 3)."""
    if stage != 3 or "optimizer_state_dict" not in state.state:
        return {}
    return {index: state.step(index) for index in mapping(state.base().get("state"), state.path, "state")}


def _parameter(
    folder: Path, name: str, shape: tuple[int, ...], step: float | None, common: Common, parts: int
) -> Parameter:
    home = folder / name
    if not home.is_dir():
        raise CheckpointError(f"{home}: there is no such folder, so parameter {name!r} is missing")
    found: dict[str, Lazy] = {}
    for file in sorted(home.iterdir()):
        key = file.name.removesuffix(".pt")
        if not file.name.endswith(".pt"):
            continue
        value = load(file)
        if key == "step":
            step = step_count(value, file)
            continue
        found[key] = _whole(file, value, shape) if parts == 1 else _of_parts(file, value, shape, parts)
    weight = found.pop(WEIGHT, None)
    if weight is None:
        raise CheckpointError(f"{home} has no fp32.pt: the weights of {name!r} are missing")
    weight = common.rounded(name, weight) if parts == 1 else weight
    return Parameter(name, weight, found, step, compute=common.compute_dtype(name))


def _check_group(parameters: Sequence[Parameter], folder: Path) -> None:
    """Raise CheckpointError if parameters of one flat group have different moments or counts of steps."""
    for parameter in parameters:
        first = parameters[0]
        for what, one, other in (
            ("files of moments", sorted(first.moments), sorted(parameter.moments)),
            ("step counts", first.step, parameter.step),
            ("dtypes", _dtypes(first), _dtypes(parameter)),
        ):
            if one != other:
                raise CheckpointError(
                    f"{folder / parameter.name} has {what} {other}, {first.name!r} of the same optimizer group {one}: "
                    "files are missing, or of several saves; copy the checkpoint again"
                )


def _dtypes(parameter: Parameter) -> list[str]:
    return [str(one.dtype) for one in (parameter.weight, *(value for _, value in sorted(parameter.moments.items())))]


def check_all_used(folder: Path, contents: Contents) -> None:
    """Raise CheckpointError if the folder `zero` has moments of a parameter that no model file trains."""
    used = {name for name, one in contents.parameters.items() if one.trainable}
    used |= {alias for alias, name in contents.aliases.items() if name in used}
    for home in folder.iterdir():
        if home.name not in used and home.is_dir():
            moments = [one.name for one in home.glob("*.pt") if one.stem not in (WEIGHT, "step")]
            if moments:
                raise CheckpointError(
                    f"{home} has {moments[0]}, but no model file says that {home.name!r} is trained: files of several "
                    "saves were mixed, or a model file is missing; convert the checkpoint again"
                )


def _whole(file: Path, value: object, shape: tuple[int, ...]) -> Lazy:
    tensor = value.get("param") if isinstance(value, dict) else value
    if not isinstance(tensor, StoredTensor):
        raise CheckpointError(f"{file} holds no tensor")
    if tensor.shape == (numel(shape),) != shape:  # what the converter writes for stage 3 is flat
        return Joined(shape, (Piece(tensor, 0, numel(shape)),), tensor.dtype)
    if tensor.shape != shape:
        raise CheckpointError(
            f"{file} has shape {list(tensor.shape)}, not {list(shape)} (padding of a vocabulary was removed? give the "
            "checkpoint that it was made from)"
        )
    return tensor


def _of_parts(file: Path, value: object, part: tuple[int, ...], parts: int) -> Lazy:
    """A tensor that the converter has joined, of parts of which one has the shape `part`."""
    tensor = value.get("param") if isinstance(value, dict) else value
    if not isinstance(tensor, StoredTensor):
        raise CheckpointError(f"{file} holds no tensor")
    if len(tensor.shape) != len(part):
        raise CheckpointError(f"{file} has shape {list(tensor.shape)}, but its {parts} parts have {len(part)} dims")
    return tensor
