"""timm, torchvision and transformers beside a torch without CUDA; what older versions of torch lack."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

_OLDEST = torch.__version__.startswith("2.6.")
SHARDING_ON_A_CPU = pytest.mark.skipif(_OLDEST, reason="torch 2.6 cannot run FSDP2 on a CPU, nor shard every operation")
FLOAT8_ROWS = pytest.mark.skipif(_OLDEST, reason="torch 2.6 cannot index float8 tensors")
STILL_STATISTICS = pytest.mark.skipif(
    _OLDEST, reason="torch 2.6 rounds the running statistics of InstanceNorm anew in evaluation mode"
)
# of `torch.distributed.checkpoint`; torch 2.6 sees by itself that there is one process
ONE_PROCESS: dict[str, Any] = {} if _OLDEST else {"no_dist": True}
TORCHS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
_LIBRARIES: list[Any] = []  # torch forgets operators whose library object is gone


def torchvision() -> ModuleType:
    """torchvision, or a skip with the reason.

    Its wheels are built for CUDA and name operators at import that only their CUDA library defines.
    """
    if torch.version.cuda is None and not _LIBRARIES:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
    return pytest.importorskip("torchvision", reason="the extra `models` is not installed")


def timm() -> ModuleType:
    """timm, or a skip with the reason."""
    torchvision()
    return pytest.importorskip("timm", reason="the extra `models` is not installed")


def transformers() -> ModuleType:
    """transformers, or a skip with the reason; it imports torchvision where that is installed."""
    torchvision()
    return pytest.importorskip("transformers", reason="the extra `models` is not installed")


def torchvision_resnet18(classes: int) -> nn.Module:
    """torchvision's network, or a skip with the reason."""
    return torchvision().models.resnet18(num_classes=classes)
