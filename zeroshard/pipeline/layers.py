"""Layers of a pipeline before they are built: a class and its arguments, so that each stage builds its own alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zeroshard.arguments import need_kind
from zeroshard.errors import UsageError


class LayerSpec:
    """A layer that is built where its stage is.

    Args:
        typename: its class, or a function that makes it.
    """

    def __init__(self, typename: Callable[..., Any], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename):
            raise UsageError(f"LayerSpec: a module's class is needed, not a {type(typename).__name__}")
        self.typename = typename
        self.module_args, self.module_kwargs = module_args, module_kwargs

    def build(self, log: bool = False) -> Any:
        """The layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    @property
    def name(self) -> str:
        """The name of its class."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def __repr__(self) -> str:
        given = [repr(value) for value in self.module_args]
        given += [f"{key}={value!r}" for key, value in self.module_kwargs.items()]
        return f"{type(self).__name__}({', '.join([self.name, *given])})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its parameters with all others of the same `key`, whichever stages these are on.

    Args:
        key: names the shared module.
        forward_fn: called with the module and the input, in place of the module.
        tied_weight_attr: the attributes that are shared; all parameters of the module are.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., Any],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        need_kind(key, str, "TiedLayerSpec(key=...)", "the name of the shared module")
        if not key or "." in key:
            raise UsageError(f"TiedLayerSpec(key={key!r}): a name without dots is needed")
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class TiedModule(nn.Module):
    """A module that several layers share, and what each of them calls. It is gathered around each of these calls.

    Attributes of the shared module can be read from here.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, call: Callable[..., Any] | None, inputs: Any) -> Any:
        """What a layer makes of its input."""
        return self.module(inputs) if call is None else call(self.module, inputs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        return getattr(self.module, name)
