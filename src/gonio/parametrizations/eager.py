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
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return False
    for x in tensors:  # noqa: SIM110 - a generator takes longer than all of the above
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return False
    return True
