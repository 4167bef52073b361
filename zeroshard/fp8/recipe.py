"""What a config or a caller asks of fp8: how numbers are scaled, and which layers take part. Values only.

    tensorwise    one scale for each tensor            (Micikevicius et al. 2022, arXiv:2209.05433, section 3.2)
    rowwise       one for each row of what a product sums over

Scales are powers of two: a floating-point number loses nothing when it is scaled by one, so that what remains is the
rounding to three bits (e4m3) or two (e5m2), equal on every machine. Rejected: scales from the largest values of earlier
steps; they save a pass over memory, and give another result after a checkpoint was loaded and on the first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeroshard.errors import PlanError

REFUSED_RECIPES = {
    "blockwise": "scales by block of 128 x 128 weights are not built",
    "mxfp8": "it needs a GPU of compute capability 10.0 or above, and is not built",
    "nvfp4": "it needs a GPU of compute capability 10.0 or above, and is not built",
    "delayed": "scales from earlier steps are not built; tensorwise takes those of the values themselves",
}


class Scaling(str, Enum):
    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"


@dataclass(frozen=True)
class Fp8:
    """How a model's matrix products run in fp8.

    Attributes:
        scaling: which numbers share a scale.
        names: layers that take part, by module path or a dotted part of it; None leaves it to `worthwhile`.
        tokens: rows of the inputs that a choice of layers reckons with.
        shards: weights that are trained rest and travel as fp8 numbers, where the optimizer's state rests on the
            device; else they are cast in each forward.
    """

    scaling: Scaling = Scaling.TENSORWISE
    names: tuple[str, ...] | None = None
    tokens: int = 8192
    shards: bool = True

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise PlanError(f"fp8: tokens must be above 0, is {self.tokens}")


@dataclass(frozen=True)
class Products:
    """The layers of a model that multiply in fp8, as a plan has them.

    Attributes:
        layers: module paths.
        resting: weights that are trained rest as fp8 numbers, where the plan keeps their master weights on the device
            and they are updated element by element.
    """

    scaling: Scaling
    layers: tuple[str, ...]
    resting: bool = True

    @property
    def resting_weights(self) -> frozenset[str]:
        """Names of the parameters that rest so."""
        rests = self.resting and self.scaling is Scaling.TENSORWISE
        return frozenset(f"{layer}.weight" for layer in self.layers) if rests else frozenset()


def scaling_of(name: str) -> Scaling:
    """The scaling of this name. Raises PlanError for one that is not built, with the reason."""
    if name in REFUSED_RECIPES:
        raise PlanError(f"the fp8 recipe {name!r} is refused: {REFUSED_RECIPES[name]}; use 'tensorwise' or 'rowwise'")
    try:
        return Scaling(name)
    except ValueError:
        raise PlanError(f"there is no fp8 recipe {name!r}; use 'tensorwise' or 'rowwise'") from None
