"""Finds the model to plan for: a Hugging Face config, a Python factory, or a size. All are built on the meta device.

    path/to/config.json, a folder with one, or a model id that is in the local cache
    pkg.mod:make_model       called without arguments; returns a module, or a module and a function that makes its batch
    --params 7e9 --layers 32 --hidden 4096

No weights are read and nothing is downloaded: sizes are all that a plan needs.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from zeroshard.errors import PlanError
from zeroshard.planner.files import read_json
from zeroshard.planner.trace.model_trace import FORWARD_ERRORS
from zeroshard.planner.trace.packed import adapt, pack, read_adapter, read_four_bits
from zeroshard.planner.trace.sized import Decoder, solve_sizes

Batch = Mapping[str, Any]
MakeBatch = Callable[[int, int], Any]
IDS = ("input_ids", "ids", "idx", "tokens", "x")
BUILD_ERRORS = (*FORWARD_ERRORS, ImportError, OSError)
"""What a user's factory may raise."""
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
OTHER_DEPTHS = ("encoder_layers", "decoder_layers", "num_decoder_layers")
DEPTHS = ("num_hidden_layers", *OTHER_DEPTHS)
MAX_DEPTH = 10_000
"""Layers are built one by one, a few milliseconds each."""
NOT_READ = (
    "The config's quantization_config is not read: weights are planned as they are without it. (With --adapter a base "
    "in 4 bits of bitsandbytes is planned in 4 bits.)"
)
LABELS = ("labels", "targets", "target", "y")


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built on the meta device, and what it is called with.

    Attributes:
        name: for titles.
        build: makes the module; called under `torch.device("meta")`.
        batch: makes the keyword arguments of one forward for (module, samples, length); called under the same.
        positions: tokens of the longest sequence that the model takes; None if that is not known.
        tokens: whether a sample is a sequence of `length` tokens (an image, for example, is not).
        keep_fp32: names of parameters that stay in float32, as in Precision.
        notes: sentences below the table that say what was not read.
        quantization: the `quantization_config` of the model's config, which counts where an adapter is trained.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[nn.Module, int, int], Batch]
    positions: int | None = None
    tokens: bool = True
    keep_fp32: tuple[str, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())
    quantization: Mapping[str, Any] | None = None

    def module(self) -> nn.Module:
        """The module on the meta device, in training mode. Raises PlanError if building it fails."""
        with torch.device("meta"):
            try:
                return self.build().train()
            except PlanError:
                raise
            except BUILD_ERRORS as error:
                said = f"{type(error).__name__}: {error}"
                raise PlanError(f"{self.name}: building the model without memory failed: {said}") from error


def find_source(
    model: str | None, *, params: float | None = None, layers: int | None = None, hidden: int | None = None
) -> ModelSource:
    """The source that the command line names. Raises PlanError, with the nearest name, if there is none."""
    if params is None and (layers, hidden) != (None, None):
        raise PlanError("--layers and --hidden are of a decoder that --params gives the size of; a MODEL has its own")
    if params is not None:
        if model is not None:
            raise PlanError(f"give a model ({model}) or --params, not both")
        return sized_source(params, layers, hidden)
    if model is None:
        raise PlanError("name a model: a config.json, pkg.mod:factory, or --params 7e9 [--layers 32 --hidden 4096]")
    path = Path(model)
    if path.is_dir() and (path / "config.json").exists():
        path = path / "config.json"
    if path.is_file():
        return huggingface_source(path)
    if ":" in model and path.suffix != ".json":
        return factory_source(model)
    if path.suffix == ".json" or model.startswith((".", "/")):
        near = get_close_matches(path.name, [p.name for p in path.parent.glob("*.json")], n=1, cutoff=0.3)
        raise PlanError(f"{model}: no such file" + (f"; did you mean {path.parent / near[0]}?" if near else ""))
    return _cached_source(model)


def sized_source(params: float, layers: int | None = None, hidden: int | None = None) -> ModelSource:
    """A decoder of that size."""
    sizes = solve_sizes(params, layers, hidden)
    return ModelSource(f"decoder of {params / 1e9:.4g}e9", lambda: Decoder(sizes), _decoder_batch)


def _decoder_batch(_: nn.Module, samples: int, length: int) -> Batch:
    return {"ids": _integers(samples, length), "labels": _integers(samples, length)}


def factory_source(text: str) -> ModelSource:
    """`pkg.mod:make_model`, also from the working directory. Raises PlanError if it can't be imported."""
    package, _, name = text.partition(":")
    if not package or package.startswith("."):
        raise PlanError(f"{text}: write pkg.mod:factory, with the module's whole name")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise PlanError(f"{text}: there is no module {error.name!r} here or among the installed packages") from error
    except (*BUILD_ERRORS, SyntaxError) as error:
        raise PlanError(f"{text}: importing {package} failed: {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        near = get_close_matches(name, [n for n in vars(module) if callable(getattr(module, n))], n=1, cutoff=0.4)
        raise PlanError(
            f"{text}: {package} has no function {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return module_source(text, factory)


def module_source(name: str, factory: Callable[[], Any]) -> ModelSource:
    """A user's own module; the factory may also return (module, make_batch)."""
    made: list[MakeBatch] = []

    def build() -> nn.Module:
        found = factory()
        module, *rest = found if isinstance(found, tuple) else (found,)
        if rest and not callable(rest[0]):
            raise PlanError(f"{name} gave {type(rest[0]).__name__} {rest[0]!r} beside the module, not a make_batch")
        made[:] = rest[:1]
        if not isinstance(module, nn.Module):
            raise PlanError(f"{name} gave a {type(module).__name__}, not a torch.nn.Module")
        return module

    def batch(module: nn.Module, samples: int, length: int) -> Batch:
        return (
            _as_keywords(module, _call_make_batch(name, made[0], samples, length))
            if made
            else guessed_batch(module, name, samples, length)
        )

    return ModelSource(name, build, batch)


def _call_make_batch(name: str, make: MakeBatch, samples: int, length: int) -> Any:
    try:
        return make(samples, length)
    except PlanError:
        raise
    except BUILD_ERRORS as error:
        said = f"{type(error).__name__}: {error}"
        raise PlanError(f"{name}: its make_batch({samples}, {length}) failed: {said}") from error


def guessed_batch(module: nn.Module, name: str, samples: int, length: int) -> Batch:
    """Ids and labels for a forward whose arguments have such names. Raises PlanError for any other argument."""
    if _is_transformers(module):
        return huggingface_batch(module, samples, length)
    wanted = [p for p in inspect.signature(module.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    found: dict[str, Any] = {}
    for parameter in wanted:
        if parameter.name in IDS or parameter.name in LABELS:
            found[parameter.name] = _integers(samples, length)
        elif parameter.default is parameter.empty:
            raise PlanError(
                f"{name}: what is {parameter.name!r} of {type(module).__name__}.forward? Let the factory give "
                "(module, make_batch), where make_batch(samples, length) returns the forward's arguments"
            )
    return found


def _as_keywords(module: nn.Module, batch: Any) -> Batch:
    if isinstance(batch, Mapping):
        return batch
    values = batch if isinstance(batch, (tuple, list)) else (batch,)
    return dict(zip(inspect.signature(module.forward).parameters, values, strict=False))


# Hugging Face


def huggingface_source(path: Path) -> ModelSource:
    """The model that a `config.json` describes."""
    content = read_json(str(path), path)
    kind = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        raise PlanError(
            f"{path}: no 'model_type', so this is not the config.json of a transformers model; "
            "a config of DeepSpeed is given beside a model, as --config"
        )
    transformers = _transformers()
    known = list(transformers.CONFIG_MAPPING)
    if kind not in known:
        near = get_close_matches(kind, known, n=1, cutoff=0.4)
        raise PlanError(
            f"{path}: transformers {transformers.__version__} has no model_type {kind!r}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    _check_numbers(str(path), content)
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(content)
    except (ValueError, TypeError, KeyError, AttributeError, *_strict_errors()) as error:
        raise PlanError(f"{path}: transformers can't read this {kind} config: {error}") from error
    _check_sizes(str(path), config)
    return config_source(str(path), config, content.get("architectures"))


def config_source(name: str, config: Any, architectures: Any = None) -> ModelSource:
    """A transformers config object, and the classes that its file names.

    Raises:
        PlanError: transformers has no such class, or none with a loss that takes token ids or images.
    """
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = getattr(config, "decoder_start_token_id", None) or 0
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
    config.use_cache = False
    cls = _model_class(name, config, architectures)
    taken = getattr(cls, "main_input_name", "input_ids")
    images = taken == "pixel_values"
    if not images and taken != "input_ids":
        raise PlanError(f"{name}: {cls.__name__} takes {taken!r}, not token ids or images; use a factory")
    if images:
        _image_shape(name, config)
    return ModelSource(
        name=name,
        build=lambda: cls(config),
        batch=lambda module, samples, length: huggingface_batch(module, samples, length),
        positions=None if images else getattr(config, "max_position_embeddings", None),
        tokens=not images,
        keep_fp32=tuple(getattr(cls, "_keep_in_fp32_modules", None) or ()),
        notes=_left_out(config),
        quantization=_quantization(config),
    )


def with_adapter(source: ModelSource, path: Path) -> ModelSource:
    """The model with the adapter that an `adapter_config.json` of peft describes, on a base that is frozen.

    A base whose config says 4 bits of bitsandbytes is planned in these; any other in its own dtypes.

    Raises:
        PlanError: there is no such file, or peft is missing, or refuses it for the model (when it is built).
    """
    adapter, four_bits = read_adapter(path), read_four_bits(source.quantization)

    def build() -> nn.Module:
        model = source.build()
        if four_bits is not None:
            pack(model, four_bits)
        return adapt(model, adapter)

    def batch(module: nn.Module, samples: int, length: int) -> Batch:
        return source.batch(cast("Any", module).get_base_model(), samples, length)

    notes = source.notes
    if four_bits is not None:
        packed = f"Only the adapter of {path} is trained; the base is in 4 bits: a byte of codes counts as a parameter."
        notes = (packed, *(note for note in notes if note != NOT_READ))
    return replace(source, build=build, batch=batch, notes=notes)


def _quantization(config: Any) -> Mapping[str, Any] | None:
    found = getattr(config, "quantization_config", None)
    return found if found is None or isinstance(found, Mapping) else found.to_dict()


def _left_out(config: Any) -> tuple[str, ...]:
    """Sentences about keys of a config that the planner does not read."""
    notes: list[str] = []
    if getattr(config, "quantization_config", None) is not None:
        notes.append(NOT_READ)
    if getattr(config, "auto_map", None) is not None:
        notes.append("The config's auto_map (code beside the weights) is not run: planned as transformers' own class.")
    return tuple(notes)


def huggingface_batch(module: nn.Module, samples: int, length: int) -> Batch:
    """Inputs and labels for a transformers model with a loss. Raises PlanError for one without."""
    config: Any = module.config
    name = type(module).__name__
    if getattr(module, "main_input_name", "input_ids") == "pixel_values":
        pixels = torch.empty(samples, *_image_shape(name, config))
        return {"pixel_values": pixels, "labels": torch.empty(samples, dtype=torch.int64)}
    accepted = inspect.signature(module.forward).parameters
    if "labels" not in accepted:
        raise PlanError(f"{name} computes no loss; name the one with a head in the config's 'architectures'")
    per_sample = "Classification" in name and "Token" not in name
    labels = torch.empty(samples, dtype=torch.int64) if per_sample else _integers(samples, length)
    return {"input_ids": _integers(samples, length), "labels": labels}


def _model_class(name: str, config: Any, architectures: Any) -> Any:
    transformers = _transformers()
    for found in _named_classes(name, architectures):
        if "labels" in inspect.signature(found.forward).parameters:
            return found
    tables = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_MASKED_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    )
    # The other tables hold parts of encoder-decoders: a decoder alone would be planned instead of the whole model.
    order = (tables[1],) if getattr(config, "is_encoder_decoder", False) else tables
    if config.model_type in ("bert", "roberta", "albert", "electra", "distilbert", "deberta"):
        order = (tables[2], *tables)
    for table in order:
        if type(config) in table:
            return table[type(config)]
    raise PlanError(f"{name}: transformers has no model with a loss for {config.model_type!r}; use a factory")


def _image_shape(name: str, config: Any) -> tuple[int, ...]:
    """Channels, height and width. Raises PlanError where the config does not say."""
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if size is None or channels is None:
        raise PlanError(f"{name}: its config has no image_size and num_channels; use a factory")
    return (channels, *size) if isinstance(size, (tuple, list)) else (channels, size, size)


def _named_classes(name: str, architectures: Any) -> list[type[nn.Module]]:
    """The classes of transformers that 'architectures' names. Raises PlanError for one that transformers lacks."""
    if not isinstance(architectures, (list, tuple, type(None))):
        raise PlanError(f"{name}: 'architectures' must be a list of class names, not {architectures!r}")
    transformers = _transformers()
    found: list[type[nn.Module]] = []
    for wanted in architectures or ():
        cls = getattr(transformers, wanted, None) if isinstance(wanted, str) else None
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            classes = [known for known in dir(transformers) if "For" in known or known.endswith("Model")]
            near = get_close_matches(str(wanted), classes, n=1, cutoff=0.6)
            raise PlanError(
                f"{name}: transformers {transformers.__version__} has no model {wanted!r}, which 'architectures' names"
                + (f"; did you mean {near[0]!r}?" if near else "; use a factory")
            )
        found.append(cls)
    return found


def _strict_errors() -> tuple[type[Exception], ...]:
    """The exception of newer configs for values that they reject, which is no ValueError."""
    errors = importlib.import_module("huggingface_hub.errors")
    found = getattr(errors, "StrictDataclassError", None)
    return () if found is None else (found,)


def _check_numbers(name: str, content: Mapping[str, Any]) -> None:
    """Refuse sizes that are no numbers, by name, before the config's own arithmetic fails on them."""
    for key in SIZES:
        if content.get(key) is not None:
            _check_size(name, key, content[key])
    hidden, heads = content.get("hidden_size"), content.get("num_attention_heads")
    if hidden and heads and content.get("head_dim") is None and hidden % heads:
        raise PlanError(f"{name}: hidden_size {hidden} does not divide by num_attention_heads {heads}")


def _check_sizes(name: str, config: Any) -> None:
    """The same for what the config's class has read, by the names that this model has for them (n_layer, d_model)."""
    names = getattr(config, "attribute_map", {})
    for key in (*SIZES, *OTHER_DEPTHS):
        own = names.get(key, key)
        value = getattr(config, own, None)
        if isinstance(value, int):
            _check_size(name, own, value)
            if key in DEPTHS and value > MAX_DEPTH:
                raise PlanError(f"{name}: {own} is {value}; the planner builds {MAX_DEPTH:,} layers at most")


def _check_size(name: str, key: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**8:
        raise PlanError(f"{name}: {key} is {value!r}; it must be a whole number from 1 to 100 million")


def _cached_source(model: str) -> ModelSource:
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{model!r} is no file, no pkg.mod:factory, and not in the local cache of Hugging Face models; download "
            "its config.json and give the path"
        ) from error
    return config_source(model, config, getattr(config, "architectures", None))


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise PlanError(
            "reading a config.json needs transformers: pip install transformers, or use --params"
        ) from error


def _is_transformers(module: nn.Module) -> bool:
    return any(base.__module__.startswith("transformers.") for base in type(module).__mro__)


def _integers(samples: int, length: int) -> torch.Tensor:
    return torch.empty(samples, length, dtype=torch.int64)
