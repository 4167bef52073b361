"""Attention of a transformers model whose sequences are divided over ranks, through transformers' own registries.

    model forward     positions and padding of the whole are put together; positions of a part are told where it stands
    mask, once        transformers' mask function of the core attention, on the whole sequence
    attention         exchange, the core attention on some heads of the whole sequence, exchange back

Each model gets a name of its own in `AttentionInterface` and `AttentionMaskInterface`, so other models of the process
keep their attention. Rejected: to put this in the place of "sdpa", which all models of the process would get.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroshard.errors import PlanError, UsageError
from zeroshard.parallel.exchange import exchange, gather_parts
from zeroshard.parallel.heads import check_heads, key_copies
from zeroshard.parallel.whole_sequence import Part, WholeSequence, digest_of, put_together

_NAME = "ulysses_"
_ATTRIBUTE = "_zeroshard_divided_attention"
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
_CACHES = ("cache", "past_key_values")
_DEFAULT_CORE = "sdpa"
_READS_NO_POSITIONS = "sdpa"
"""The core attention that gets all of the documents by its mask."""
_LOOKED_AT = 3
"""Forwards in training, and in evaluation, in which ranks compare their tokens: whoever forgets to cut does so then."""


def divide_attention(
    model: nn.Module, group: dist.ProcessGroup, core: str | None = None, *, disable_in_eval: bool = False
) -> None:
    """Let the attention of a transformers model, or of one inside of `model`, exchange over the ranks of a sequence.

    Args:
        core: transformers' name of the attention on the whole sequence; by default the model's, or sdpa for eager.
        disable_in_eval: a model in evaluation gets whole sequences, and exchanges nothing.

    Raises:
        PlanError: what can't be divided, with the numbers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    inner = find_transformers_model(model)
    if inner is None:
        raise PlanError(
            f"{type(model).__name__} is no transformers model: let its attention exchange itself, with "
            "deepspeed.sequence.layer.DistributedAttention or zeroshard.parallel.exchange"
        )
    known = vars(inner).get(_ATTRIBUTE)
    before = known.core if isinstance(known, DividedAttention) else inner.config._attn_implementation
    check_dividable(inner.config, group.size(), type(inner).__name__)
    _check_model(model, inner)
    attentions, masks = AttentionInterface(), AttentionMaskInterface()
    core = _set_core(inner, core, before, attentions)
    if isinstance(known, DividedAttention):
        known.leave()
    made = DividedAttention(group, core, attentions[core], masks.get(core), disable_in_eval)
    name = f"{_NAME}{sum(key.startswith(_NAME) for key in attentions)}"
    AttentionInterface.register(name, made.attention)
    AttentionMaskInterface.register(name, made.mask)
    inner.set_attn_implementation(name)
    made.listen(inner)
    vars(inner)[_ATTRIBUTE] = made


def _set_core(inner: Any, core: str | None, before: str | None, attentions: Mapping[str, Any]) -> str:
    """The core attention, which transformers has found to fit the model. Raises PlanError where it doesn't."""
    if core is None:
        core = before if before is not None and before in attentions else _DEFAULT_CORE
    where = f"sequence parallelism of {type(inner).__name__}: core attention {core!r}"
    try:
        inner.set_attn_implementation(core)
    except (ImportError, ValueError) as error:  # not installed, or nothing of that name
        raise PlanError(f"{where}: {error}") from error
    if core not in attentions:
        raise PlanError(f"{where} is not in transformers' registry: {', '.join(sorted(attentions))}")
    return core


def find_transformers_model(model: nn.Module) -> Any:
    """The outermost transformers model in `model`: itself, or the one that an adapter or a script wraps; or None."""
    return next((module for module in model.modules() if _is_transformers(type(module))), None)


def _is_transformers(kind: type[nn.Module]) -> bool:
    """Told by names, since importing transformers takes seconds, and a model that is its own has imported it."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.") for base in kind.__mro__
    )


def check_dividable(config: Any, ranks: int, name: str) -> None:
    """Raises PlanError for a transformers config whose sequences can't be divided, with the numbers."""
    where = f"sequence parallelism of {name} over {ranks} ranks"
    if config.get_text_config() is not config:
        raise PlanError(f"{where}: the model has parts for images or sound, whose tokens aren't divided; text alone is")
    if getattr(config, "is_encoder_decoder", False):
        raise PlanError(f"{where}: an encoder-decoder has two sequences of different lengths, which isn't built")
    layers = [*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())]
    others = sorted(set(layers) - _KNOWN_LAYERS)
    if others:
        raise PlanError(
            f"{where}: its layers of type {', '.join(others)} carry a state along the sequence or cut it themselves; "
            f"{' and '.join(sorted(_KNOWN_LAYERS))} can be divided"
        )
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        key_heads = getattr(config, "num_key_value_heads", None)
        check_heads(heads, key_heads if isinstance(key_heads, int) else heads, ranks, where)


def _check_model(model: nn.Module, inner: Any) -> None:
    name = type(inner).__name__
    if inner._is_stateful or not inner._supports_attention_backend:
        raise PlanError(
            f"sequence parallelism of {name}: its attention does not go through transformers' AttentionInterface, or "
            "it carries a state along the sequence"
        )
    known = inspect.signature(type(inner.base_model).forward).parameters
    for needed in ("attention_mask", "position_ids"):
        if needed not in known:
            raise PlanError(
                f"sequence parallelism of {name}: its forward takes no {needed}, so a rank can't be told what its part "
                "of the sequence is"
            )
    adapters = getattr(model, "active_peft_config", None)
    if getattr(adapters, "is_prompt_learning", False):
        raise PlanError(
            f"sequence parallelism of {name}: prompt tuning puts tokens before each sequence, which every rank would "
            "put before its part; use LoRA"
        )


class DividedAttention:
    """The attention of one model over the ranks of a sequence.

    Attributes:
        core: transformers' name of the attention on the whole sequence.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        core: str,
        attention: Callable[..., Any],
        mask: Callable[..., Any] | None,
        disable_in_eval: bool,
    ) -> None:
        self.core = core
        self._group, self._attention, self._mask = group, attention, mask
        self._disable_in_eval = disable_in_eval
        self._whole: WholeSequence | None = None  # of the forward that runs
        self._names: tuple[str, ...] = ()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # others may have the same config object
        self._hooks: list[RemovableHandle] = []
        self._compared = {True: 0, False: 0}

    def listen(self, model: Any) -> None:
        """Put the whole together before each forward of the model's base, which its heads and adapters all call."""
        base: nn.Module = model.base_model
        self._names = tuple(inspect.signature(type(base).forward).parameters)[1:]
        self._modules.update(model.modules())
        self._hooks = [
            base.register_forward_pre_hook(self._before, with_kwargs=True),
            base.register_forward_hook(self._after, always_call=True),
        ]

    def leave(self) -> None:
        """Listen no longer."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._passes(base):
            self._whole = None
            return None
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if any(given.get(name) is not None for name in _CACHES):
            raise UsageError(
                "a cache of keys was given to a model whose sequences are divided over ranks, and it would hold a part "
                "of them: generate with an undivided model, or with disable_in_eval=True and model.eval()"
            )
        part = self._part_of(given, training=base.training)
        self._whole = put_together(part, self._group, packed=not _caches(base, given))
        given["position_ids"] = self._whole.own
        if part.padding is None:  # else transformers would look for documents in this part alone
            given["attention_mask"] = torch.ones(part.samples, part.tokens, dtype=torch.int64, device=part.device)
        return (), given

    def _part_of(self, given: Mapping[str, Any], *, training: bool) -> Part:
        tokens = _tokens_of(given)
        self._compared[training] += 1
        digest = digest_of(tokens) if self._compared[training] <= _LOOKED_AT else None
        return _part_of(given, tokens, digest)

    def _after(self, base: nn.Module, args: Any, output: Any) -> None:
        self._whole = None

    def mask(self, **arguments: Any) -> Any:
        """The core attention's mask of the whole sequence."""
        whole = self._whole
        if self._mask is None:
            return None
        if whole is None:
            return self._mask(**arguments)
        if arguments.get("use_vmap"):
            raise PlanError(
                "a model with a mask of its own (and_mask_function or or_mask_function) can't have its sequences "
                "divided: the mask knows the tokens of one part alone"
            )
        causal = "allow_is_bidirectional_skip" not in arguments
        if whole.documents is not None and causal:
            arguments["mask_function"] = whole.within_documents(arguments["mask_function"])
            arguments["allow_is_causal_skip"] = False
        lengths = {"q_length": whole.tokens, "kv_length": whole.tokens, "q_offset": 0, "kv_offset": 0}
        return self._mask(**{**arguments, **lengths, "attention_mask": whole.padding})

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        """The core attention, with tensors of shape (samples, heads, tokens, width) of this rank's part."""
        if self._passes(module):
            return self._attention(module, query, key, value, attention_mask, **options)
        group, ranks = self._group, self._group.size()
        heads, key_heads = query.shape[1], key.shape[1]
        if query.shape[2] != key.shape[2]:
            raise PlanError(
                f"attention of {query.shape[2]} tokens to {key.shape[2]} others can't be divided over ranks: each has "
                "a part of one sequence"
            )
        check_heads(heads, key_heads, ranks, type(module).__name__)
        copies = key_copies(heads, key_heads, ranks)
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        query, key, value = (exchange(tensor, group, 1, 2) for tensor in (query, key, value))
        positions = options.get("position_ids")
        if positions is not None and self.core != _READS_NO_POSITIONS:
            options["position_ids"] = gather_parts(positions.expand(query.shape[0], -1), group, 1)
        sinks = options.get("s_aux")
        if sinks is not None:
            options["s_aux"] = sinks.unflatten(0, (ranks, -1))[group.rank()]
        some = _SomeHeads(module, query.shape[1] // key.shape[1])
        mixed, _ = self._attention(some, query, key, value, attention_mask, **options)
        return exchange(mixed, group, 1, 2), None

    def _passes(self, module: nn.Module) -> bool:
        return module not in self._modules or (self._disable_in_eval and not module.training)


class _SomeHeads:
    """An attention module as the core attention reads it, with as many queries to each head of keys as there are."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _tokens_of(given: Mapping[str, Any]) -> torch.Tensor:
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, torch.Tensor):
        raise UsageError("a model whose sequences are divided over ranks needs input_ids or inputs_embeds")
    return tokens


def _part_of(given: Mapping[str, Any], tokens: torch.Tensor, digest: torch.Tensor | None) -> Part:
    """What a forward was given. Raises UsageError for what is no part of a sequence."""
    shape = (tokens.shape[0], tokens.shape[1])
    padding, positions = given.get("attention_mask"), given.get("position_ids")
    if padding is not None and (not isinstance(padding, torch.Tensor) or tuple(padding.shape) != shape):
        found = tuple(padding.shape) if isinstance(padding, torch.Tensor) else type(padding).__name__
        raise UsageError(
            f"attention_mask is {found}, but this rank's part of the sequence is {shape}: give the part of a mask of "
            "padding that belongs to it, or position_ids that begin each document at 0"
        )
    if positions is not None and positions.shape[-1] != shape[1]:
        raise UsageError(f"position_ids are {tuple(positions.shape)}, but this rank's part of the sequence is {shape}")
    return Part(*shape, tokens.device, positions, padding, digest)


def _caches(base: Any, given: Mapping[str, Any]) -> bool:
    """Whether the model makes a cache of keys, in which case transformers takes no notice of packed documents."""
    asked = given.get("use_cache")
    asked = getattr(base.config, "use_cache", False) if asked is None else asked
    checkpoints = getattr(base, "gradient_checkpointing", False) and base.training and torch.is_grad_enabled()
    return bool(asked) and not checkpoints
