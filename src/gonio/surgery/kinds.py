"""The kind of a layer, judged by the forward that it runs and not by its class name alone.

A subclass of a torch layer may compute anything: a convolution that standardises its weight, a batch norm
with an activation inside. A conclusion from torch's formula holds only where torch's own forward runs.
"""

from __future__ import annotations

import copy

from torch import nn

from gonio.nn import SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHTED = (nn.Linear, nn.Bilinear, *_CONVOLUTIONS)
SWITCHABLE_NORMS = (SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d)
_BATCH_NORMS = (nn.SyncBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_TORCH_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
# Batch norms of timm with dropout and an activation inside; known by name, so that timm is not needed.
_NORMS_WITH_ACTIVATION = frozenset({"BatchNormAct2d", "SyncBatchNormAct"})
_TAIL = ("drop", "act")


def computes_as(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether the module is of one of these classes and runs that class's own forward.

    Example:
        >>> from gonio.surgery.kinds import computes_as
        >>> class Halved(nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x) / 2
        >>> computes_as(nn.Linear(2, 2), (nn.Linear,)), computes_as(Halved(2, 2), (nn.Linear,))
        (True, False)
    """
    kind = next((kind for kind in kinds if isinstance(module, kind)), None)
    if kind is None or "forward" in vars(module):
        return False
    methods = ("forward", "_conv_forward")
    return all(getattr(type(module), method, None) is getattr(kind, method, None) for method in methods)


def computes_plainly(module: nn.Module) -> bool:
    """Whether the module applies its own Parameter `weight`, and a bias, as torch's layer of its kind does."""
    own = module._parameters.get("weight")
    return own is not None and own is getattr(module, "weight", None) and computes_as(module, WEIGHTED)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether the module is a batch norm of known formula: torch's, perhaps followed by :func:`norm_tail`."""
    return computes_as(module, _BATCH_NORMS) or _has_tail(module)


def norm_tail(norm: nn.Module) -> list[nn.Module]:
    """The dropout and activation that a batch norm of timm applies to its output; empty for torch's own."""
    return [norm._modules[name] for name in _TAIL] if _has_tail(norm) else []  # type: ignore[misc]


def without_tail(norm: nn.Module) -> nn.Module:
    """A batch norm of torch's own class on the same Parameters and buffers; the norm itself if it has no tail."""
    if not _has_tail(norm):
        return norm
    plain = copy.copy(norm)
    plain.__class__ = next(kind for kind in _BATCH_NORMS if isinstance(norm, kind))
    for name in ("_parameters", "_buffers"):
        plain.__dict__[name] = norm.__dict__[name].copy()
    plain.__dict__["_modules"] = {}
    return plain


def _has_tail(module: nn.Module) -> bool:
    return type(module).__name__ in _NORMS_WITH_ACTIVATION and set(module._modules) == set(_TAIL)


def is_norm(module: nn.Module) -> bool:
    """Whether the module normalises its input, so that the scale of its input has no effect.

    True for torch's normalisation classes, and for any other class without children that has `Norm` in its name. Frozen
    norms are fixed affine maps, and local response normalisation adds a constant to its divisor: neither counts.
    """
    names = [base.__name__ for base in type(module).__mro__]
    if any(word in name for name in names for word in ("Frozen", "LocalResponse")):
        return False
    if isinstance(module, _TORCH_NORMS):
        return True
    return not module._modules and any("Norm" in name for name in names)
