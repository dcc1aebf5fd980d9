"""What this package uses of torch that has no public name; nothing else in it does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_leaves

BATCH_NORMS = (_BatchNorm,)
STATISTICAL_NORMS = (_BatchNorm, _InstanceNorm)  # the base classes of norms with running statistics
ELEMENTWISE_NORMS = (nn.LayerNorm, nn.RMSNorm)  # norms with a gain for each entry of what they normalise

__all__ = ["BATCH_NORMS", "ELEMENTWISE_NORMS", "STATISTICAL_NORMS", "pre_hooks_of", "recurrent_weights", "tree_leaves"]


def pre_hooks_of(module: nn.Module) -> list[Any]:
    """The hooks that run before a module's forward."""
    return list(module._forward_pre_hooks.values())


def recurrent_weights(module: nn.Module) -> Mapping[str, Tensor]:
    """The weights of torch's dynamically quantised recurrent layers, which are neither parameters nor buffers."""
    dynamic = sys.modules.get("torch.ao.nn.quantized.dynamic")
    kinds = tuple(getattr(dynamic, name) for name in ("LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell") if dynamic)
    return dict(module.get_weight()) if isinstance(module, kinds) else {}  # type: ignore[operator]
