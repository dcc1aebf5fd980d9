"""When a hand-written backward pass may be used."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = ["is_eager"]


def is_eager(*tensors: Tensor) -> bool:
    """Whether these are plain tensors in plain eager mode, differentiated backwards if at all.

    Only then the custom autograd functions of this package are used. Compilers fuse the plain formula
    themselves, and transforms of functions and tensor subclasses know plain operations only.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and all(type(x) in (Tensor, nn.Parameter) for x in tensors)
    )
