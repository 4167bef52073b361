"""Opaque modules, inside of which no unit may begin: the hooks of their submodules don't see every use of parameters.

    reads       nn.MultiheadAttention passes `out_proj.weight` to a function and never calls `out_proj`: a unit of
                `out_proj` alone would never be gathered
    branches    nn.AdaptiveLogSoftmaxWithLoss calls a tail only if the batch has a token of it: units inside would be
                gathered on some ranks only
    no hooks    a scripted module, and what is inside of a traced one, runs below Python, where no hook is called
                before its forward

The first kind may be a unit as a whole; the others belong to the unit around them. Rejected: hooks on the methods of a
scripted module; modules inside of it would still be used without them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of torch that read parameters of their submodules, at least on a fast path."""
BRANCHING = (nn.AdaptiveLogSoftmaxWithLoss,)
"""Modules of torch that call submodules for some data only, or are used without being called themselves."""


def takes_hooks(module: nn.Module) -> bool:
    """Whether Python code runs before and after the module's forward."""
    return not isinstance(module, torch.jit.ScriptModule) or isinstance(module, torch.jit.TopLevelTracedModule)


def is_opaque(module: nn.Module) -> bool:
    """Whether no unit may begin inside of the module."""
    return (
        isinstance(module, (*READERS, *BRANCHING, torch.jit.ScriptModule))
        or parametrize.is_parametrized(module)
        or (isinstance(module, fx.GraphModule) and _reads_attributes(module))
    )


def can_be_unit(module: nn.Module) -> bool:
    """Whether the module's own hooks see each use of it."""
    return takes_hooks(module) and not isinstance(module, BRANCHING)


def reachable_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The module's own parameters, and those of children that take no hooks, which its hooks have to cover, too."""
    yield from module.named_parameters(recurse=False)
    for name, child in module.named_children():
        if not takes_hooks(child):
            yield from child.named_parameters(prefix=name)


def _reads_attributes(module: fx.GraphModule) -> bool:
    """Whether the graph reads parameters of submodules directly (an exported program), instead of calling these."""
    return any(node.op == "get_attr" and "." in str(node.target) for node in module.graph.nodes)
