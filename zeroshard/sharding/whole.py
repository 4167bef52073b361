"""Modules that are not taken apart: what reads its children's parameters itself, and what takes no hooks.

    reads       nn.MultiheadAttention hands `out_proj.weight` to a function and never calls `out_proj`: a unit of
                `out_proj` alone would be gathered by nobody
    branches    nn.AdaptiveLogSoftmaxWithLoss calls a tail only where the batch has a token of it: units inside would
                be gathered on some ranks only
    no hooks    a scripted module, and what is inside of a traced one, runs below Python, where nothing sees its
                forward begin

The first may be a unit as a whole; the others lie in the unit around them. Rejected: hooks on the methods of a scripted
module in place of hooks on modules; a module inside of it would still pass them by.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of torch that read parameters of modules inside of them, if only on a fast path."""
BRANCHING = (nn.AdaptiveLogSoftmaxWithLoss,)
"""Modules of torch that call modules inside of them for some data only, or are not called themselves."""


def takes_hooks(module: nn.Module) -> bool:
    """Whether Python code runs before and after the module's forward."""
    return not isinstance(module, torch.jit.ScriptModule) or isinstance(module, torch.jit.TopLevelTracedModule)


def is_whole(module: nn.Module) -> bool:
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
    """The module's own parameters, and those of modules in it that take no hooks: its hooks have to answer for both."""
    yield from module.named_parameters(recurse=False)
    for name, child in module.named_children():
        if not takes_hooks(child):
            yield from child.named_parameters(prefix=name)


def _reads_attributes(module: fx.GraphModule) -> bool:
    """Whether the graph takes parameters out of modules inside (an exported program), instead of calling these."""
    return any(node.op == "get_attr" and "." in str(node.target) for node in module.graph.nodes)
