"""What a config or a caller wants in fp8: how tensors are scaled, and which layers compute so. This module has values
only.

    tensorwise    one scale per tensor            (Micikevicius et al. 2022, arXiv:2209.05433, section 3.2)
    rowwise       one scale per row, along the dim that a product sums over
    blockwise     one scale per 128 values of a row, along that dim, and per 128 x 128 weights
                                                  (DeepSeek-V3, arXiv:2412.19437, section 3.3)

Scales are powers of two, by which floating-point numbers are scaled without rounding. So the only rounding is that to
three bits (e4m3) or two (e5m2), which is the same on every machine. Rejected: scales from the largest values of earlier
steps; they save a pass over memory, but change results in the first step, and after a checkpoint was loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeroshard.errors import PlanError
from zeroshard.field_types import check_fields

AUTO = "auto"
"""Among names of layers: also those that are chosen without names."""
REFUSED_RECIPES = {
    "mxfp8": "it needs a GPU of compute capability 10.0 or above, and is not built",
    "nvfp4": "it needs a GPU of compute capability 10.0 or above, and is not built",
    "delayed": "scales from earlier steps are not built; tensorwise takes those of the values themselves",
}


BLOCK = 128
"""Side of a block of weights that share a scale, and values of a row that do, by `Scaling.BLOCKWISE`."""

_RECIPES = "use 'tensorwise', 'rowwise' or 'blockwise'"


class Scaling(str, Enum):
    """Which elements of a tensor share a scale."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    BLOCKWISE = "blockwise"

    @property
    def multiple(self) -> int:
        """A layer's sizes must be multiples of it."""
        return BLOCK if self is Scaling.BLOCKWISE else 16

    @property
    def rests(self) -> bool:
        """Whether weights can rest with such scales; by row they need other codes in the backward."""
        return self is not Scaling.ROWWISE

    @property
    def block(self) -> int:
        """Side of the blocks of a weight that share a scale; 0 if all of the weight does."""
        return BLOCK if self is Scaling.BLOCKWISE else 0


@dataclass(frozen=True)
class Fp8:
    """How a model's matrix products run in fp8.

    Attributes:
        scaling: which elements share a scale.
        names: layers that compute in fp8, by module path or a dotted part of it; None lets `convert.choose` choose, and
            "auto" among the names lets it choose besides.
        tokens: rows of the inputs for which layers are chosen.
        shards: trained weights rest and are gathered in fp8, if the optimizer's state rests on the device; else they
            are cast in each forward.
    """

    scaling: Scaling = Scaling.TENSORWISE
    names: tuple[str, ...] | None = None
    tokens: int = 8192
    shards: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tokens < 1:
            raise PlanError(f"fp8: tokens must be above 0, is {self.tokens}")


@dataclass(frozen=True)
class Products:
    """The layers of a model that compute in fp8, in a plan.

    Attributes:
        layers: module paths.
        resting: trained weights rest in fp8, if the plan keeps their master weights on the device and updates them
            element by element.
    """

    scaling: Scaling
    layers: tuple[str, ...]
    resting: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def resting_weights(self) -> frozenset[str]:
        """Names of the parameters that may rest in fp8."""
        rests = self.resting and self.scaling.rests
        return frozenset(f"{layer}.weight" for layer in self.layers) if rests else frozenset()


def scaling_of(name: str) -> Scaling:
    """The scaling with this name. Raises PlanError, with the reason, for one that is not built."""
    if name in REFUSED_RECIPES:
        raise PlanError(f"the fp8 recipe {name!r} is refused: {REFUSED_RECIPES[name]}; {_RECIPES}")
    try:
        return Scaling(name)
    except ValueError:
        raise PlanError(f"there is no fp8 recipe {name!r}; {_RECIPES}") from None
