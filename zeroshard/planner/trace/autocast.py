"""Does on meta tensors what torch.autocast does on a GPU: some operations compute in 16 bits, some in float32.

torch's own autocast goes by a tensor's device, and does nothing on the meta device. This mode casts the arguments of
the same operations, by torch's list for CUDA ("Autocast Op Reference"), before they run. So the trace has the casts,
the dtypes that autograd keeps, and kernels at the rates of their dtypes. As with torch's cache, a parameter is cast
once in a forward, and once more where a block is recomputed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER = _names(
    """
    __matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d conv_transpose3d gru_cell linear lstm_cell matmul mm mv prelu rnn_relu_cell
    rnn_tanh_cell scaled_dot_product_attention einsum
    """
)
"""Operations in the 16-bit dtype."""
FLOAT32 = _names(
    """
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist
    cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss
    layer_norm log log10 log_softmax log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss
    nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss
    softmax softmin softplus sum renorm tan triplet_margin_loss
    """
)
"""Operations in float32."""


class Autocast(TorchFunctionMode):
    """Casts as torch.autocast("cuda", dtype) does, in the forward and where it is recomputed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._cached: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in LOWER:
            args, kwargs = tree_map(self._lower, (args, kwargs or {}))
        elif name in FLOAT32:
            args, kwargs = tree_map(_float32, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def forget(self) -> None:
        """Drop the cached casts at the end of the forward, as torch does."""
        self._cached.clear()

    def _lower(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self._dtype)
        if id(value) not in self._cached:
            self._cached[id(value)] = value.to(self._dtype)
        return self._cached[id(value)]


def _float32(value: Any) -> Any:
    low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value
