"""What this package uses of torch that has no public name; nothing else in it does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves

BATCH_NORMS = (_BatchNorm,)
STATISTICAL_NORMS = (_BatchNorm, _InstanceNorm)  # the base classes of norms with running statistics
ELEMENTWISE_NORMS = (nn.LayerNorm, nn.RMSNorm)  # norms with a gain for each entry of what they normalise

__all__ = [
    "BATCH_NORMS",
    "ELEMENTWISE_NORMS",
    "STATISTICAL_NORMS",
    "recurrent_weights",
    "tree_leaves",
    "weights_of_hooks",
]


def weights_of_hooks(module: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """The weights that torch's old weight norm, spectral norm and pruning renew before each forward.

    The attribute of the module is out of date after a load of its parameters. What is returned computes what the next
    forward in evaluation mode would use, and changes nothing.
    """
    made: dict[str, Callable[[], Tensor]] = {}
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            made[hook.name] = partial(hook.compute_weight, module)
        elif isinstance(hook, SpectralNorm):
            made[hook.name] = partial(hook.compute_weight, module, do_power_iteration=False)
        elif isinstance(hook, BasePruningMethod):
            made[hook._tensor_name] = partial(hook.apply_mask, module)
    return made


def recurrent_weights(module: nn.Module) -> Mapping[str, Tensor]:
    """The weights of torch's dynamically quantised recurrent layers, which are neither parameters nor buffers."""
    dynamic = sys.modules.get("torch.ao.nn.quantized.dynamic")
    kinds = tuple(getattr(dynamic, name) for name in ("LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell") if dynamic)
    return dict(module.get_weight()) if isinstance(module, kinds) else {}  # type: ignore[operator]
