"""What this package uses of torch that has no public name; nothing else in it does."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from gonio.execution import loaded

BATCH_NORMS = (_BatchNorm,)
_DYNAMIC = ("LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")

__all__ = ["BATCH_NORMS", "recurrent_weights", "tree_leaves"]


def recurrent_weights(module: nn.Module) -> Mapping[str, Tensor]:
    """The weights of torch's dynamically quantised recurrent layers, which are neither parameters nor buffers."""
    kinds = loaded(*(f"torch.ao.nn.quantized.dynamic:{kind}" for kind in _DYNAMIC))
    return dict(module.get_weight()) if isinstance(module, kinds) else {}  # type: ignore[operator]
