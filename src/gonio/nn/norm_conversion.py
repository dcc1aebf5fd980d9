"""Conversions between batch, layer, instance and group normalisation, with scale, shift and equal statistics kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gonio.errors import InvalidArgumentError, NotApplicableError, with_article
from gonio.nn.conversion import check_plain
from gonio.nn.switchable_norm import SwitchableNorm

# A converter's annotation says which layers it takes, so each union leaves out what the converter makes.
_Batch = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
_Instance = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
Norm = TypeVar("Norm", bound=nn.Module)

_BATCH: dict[int, type[_Batch]] = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_INSTANCE: dict[int, type[_Instance]] = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
_KINDS = (*_BATCH.values(), *_INSTANCE.values(), nn.SyncBatchNorm, nn.GroupNorm, nn.LayerNorm, SwitchableNorm)


def to_batch_norm(
    norm: nn.SyncBatchNorm | _Instance | nn.LayerNorm | nn.GroupNorm | SwitchableNorm, *, dims: int | None = None
) -> _Batch:
    """A batch norm with the scale and shift of another norm.

    The same function as a `SyncBatchNorm` in one process; in evaluation also as an instance norm that tracks
    statistics, and as a switchable norm whose mixture is batch statistics alone. These hand over their running
    statistics. After every other conversion they start at mean 0 and variance 1:
    :func:`gonio.calibrate_` measures them.

    Args:
        norm: the layer; it and the result have the same Parameters.
        dims: dimensions of the positions of an input (N, C, *positions), 0 to 3, where the layer does not
            tell: a group norm and a `SyncBatchNorm`; also 0 for a layer norm over (C,), see :func:`to_group_norm`.

    Raises:
        InvalidArgumentError: if `dims` is missing, or not what the layer's inputs have.
        NotApplicableError: if the layer is a subclass with another forward, or its scale differs between positions.

    Example:
        >>> norm = nn.GroupNorm(2, 6)
        >>> new = gonio.nn.to_batch_norm(norm, dims=2)
        >>> type(new).__name__, new.weight is norm.weight
        ('BatchNorm2d', True)
    """
    _check(norm, verb="to_batch_norm")
    kind = _BATCH[_dims(norm, dims, verb="to_batch_norm")]
    tracks = isinstance(norm, _Instance) or getattr(norm, "track_running_stats", True)
    momentum = getattr(norm, "momentum", 0.1)
    new = kind(_channels(norm), momentum=momentum, track_running_stats=tracks, **_common(norm))
    for name, value in new.named_buffers():
        if norm._buffers.get(name) is not None:
            value.copy_(norm.get_buffer(name))
    return _carry_(new, norm, verb="to_batch_norm")


def to_instance_norm(
    norm: _Batch | nn.SyncBatchNorm | nn.LayerNorm | nn.GroupNorm | SwitchableNorm, *, dims: int | None = None
) -> _Instance:
    """An instance norm, without running statistics, with the scale and shift of another norm.

    The same function as a group norm with one channel per group. Running statistics of a batch norm are left
    behind, because an instance norm uses those of its input in evaluation too.

    `dims` and errors are as in :func:`to_batch_norm`, with `dims` 1 to 3: inputs (N, C) have no instance statistics.

    Example:
        >>> x = torch.arange(48.0).reshape(2, 6, 2, 2).sin()
        >>> norm = nn.GroupNorm(6, 6)
        >>> torch.allclose(gonio.nn.to_instance_norm(norm, dims=2)(x), norm(x), atol=1e-6)
        True

    References: D. Ulyanov et al., "Instance normalization", 2016. https://arxiv.org/abs/1607.08022
    """
    _check(norm, verb="to_instance_norm")
    dims = _dims(norm, dims, verb="to_instance_norm")
    if dims == 0:
        why = "each value of an input (N, C) is an instance of its own, and would become 0"
        raise NotApplicableError("to_instance_norm", type(norm).__name__, why, "Use to_group_norm or to_layer_norm.")
    new = _INSTANCE[dims](_channels(norm), momentum=getattr(norm, "momentum", 0.1), **_common(norm))
    return _carry_(new, norm, verb="to_instance_norm")


def to_group_norm(
    norm: _Batch | nn.SyncBatchNorm | _Instance | nn.LayerNorm | SwitchableNorm,
    *,
    groups: int = 32,
    dims: int | None = None,
) -> nn.GroupNorm:
    """A group norm with the scale and shift of another norm.

    With one group it is the same function as a layer norm over (C, *positions), with one channel per group
    the same as an instance norm. It has no running statistics, and no sample depends on another, so those of a
    batch norm are left behind.

    Args:
        norm: the layer; it and the result have the same Parameters.
        groups: how many. Where they do not divide the channels, the largest smaller number that does and
            leaves two channels or more in each group, as single channels would be instance normalisation.
        dims: 0 for a layer norm over (C,) that normalises inputs (N, C). Such a layer does not tell whether the
            last axis of its inputs, which it normalises, is the axis of channels; in a transformer it is not.

    Raises: as :func:`to_batch_norm`, and InvalidArgumentError if `groups` is below 1.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 100, 3), nn.BatchNorm2d(100))
        >>> _ = gonio.swap_(model, gonio.nn.to_group_norm)
        >>> [norm.num_groups for norm in model[1::2]]
        [32, 25]

    References: Y. Wu and K. He, "Group normalization", ECCV 2018, section 3. https://arxiv.org/abs/1803.08494
    """
    if groups < 1:
        raise InvalidArgumentError("to_group_norm: groups must be >= 1", f"{groups}", "The paper's 32 is the default.")
    _check(norm, verb="to_group_norm")
    if dims is not None or isinstance(norm, nn.LayerNorm):
        _dims(norm, dims, verb="to_group_norm")
    channels = _channels(norm)
    if channels % groups:
        groups = max(g for g in range(1, min(groups, max(channels // 2, 1)) + 1) if channels % g == 0)
    new = nn.GroupNorm(groups, channels, **_common(norm))
    return _carry_(new, norm, verb="to_group_norm")


def to_layer_norm(
    norm: _Batch | nn.SyncBatchNorm | _Instance | nn.GroupNorm | SwitchableNorm, *, positions: Sequence[int] = ()
) -> nn.LayerNorm:
    """A layer norm over (C, *positions) with the scale and shift of another norm.

    The same function as a group norm with one group, for inputs of this one size: torch's layer norm has a scale
    and a shift per element, which start with those of the channels. ``to_group_norm(norm, groups=1)`` normalises
    inputs of every size, with the same Parameters.

    Args:
        norm: the layer; it keeps its Parameters.
        positions: sizes of the inputs after (N, C).

    Raises:
        InvalidArgumentError: if there are more or fewer positions than the layer's inputs have.
        NotApplicableError: if the layer is a subclass with another forward.

    Example:
        >>> x = torch.arange(48.0).reshape(2, 6, 2, 2).sin()
        >>> norm = nn.GroupNorm(1, 6)
        >>> torch.allclose(gonio.nn.to_layer_norm(norm, positions=(2, 2))(x), norm(x), atol=1e-6)
        True

    References: J. L. Ba et al., "Layer normalization", 2016. https://arxiv.org/abs/1607.06450
    """
    _check(norm, verb="to_layer_norm")
    if len(positions) not in _ranks(norm):
        ranks = " or ".join(map(str, _ranks(norm)))
        raise InvalidArgumentError(
            f"to_layer_norm: {with_article(type(norm).__name__)} needs the sizes of {ranks} positions",
            f"positions={tuple(positions)}",
            "Pass the sizes of its inputs after (N, C), or use to_group_norm(norm, groups=1), the same function.",
        )
    common = _common(norm)
    affine = common.pop("affine")
    new = nn.LayerNorm((_channels(norm), *positions), elementwise_affine=affine, **common)
    for name in ("weight", "bias"):
        new._parameters[name] = _per_element(norm._parameters[name], new.normalized_shape)
    return new.train(norm.training)


def _check(norm: nn.Module, *, verb: str) -> None:
    found = type(norm).__name__
    if any(is_lazy(tensor) for tensor in (*norm.parameters(), *norm.buffers())):
        raise NotApplicableError(verb, found, "it has no shape yet", "Run one batch through it first.")
    kind = next((kind for kind in _KINDS if isinstance(norm, kind)), None)
    if kind is None:
        why = "it is no batch, layer, instance, group or switchable norm"
        raise NotApplicableError(verb, found, why, "Select layers of these types.")
    check_plain(norm, kind, verb=verb)


def _ranks(norm: nn.Module) -> tuple[int, ...]:
    """How many dimensions the positions of an input (N, C, *positions) may have, the commonest number first."""
    if isinstance(norm, nn.LayerNorm):
        return (len(norm.normalized_shape) - 1,)
    if isinstance(norm, SwitchableNorm):
        return tuple(rank - 2 for rank in reversed(norm.ranks))
    known = [dims for table in (_BATCH, _INSTANCE) for dims, kind in table.items() if isinstance(norm, kind)]
    return tuple(reversed(known)) or (0, 1, 2, 3)


def _dims(norm: nn.Module, dims: int | None, *, verb: str) -> int:
    """How many dimensions the positions of an input have: from `dims`, or from the type of the layer."""
    ranks = _ranks(norm)
    if dims is None and ranks[0] > 0:  # the type tells
        return ranks[0]
    if dims is not None and dims in ranks:
        return dims
    about = f"{verb}: {with_article(type(norm).__name__)}"
    if ranks == (0,):
        about += f" over ({_channels(norm)},), which normalises the last axis of its inputs,"
    do = "Pass the number of dimensions of its inputs after (N, C)."
    raise InvalidArgumentError(f"{about} needs dims={' or '.join(map(str, sorted(ranks)))}", f"dims={dims}", do)


def _channels(norm: nn.Module) -> int:
    if isinstance(norm, nn.LayerNorm):
        return norm.normalized_shape[0]
    return int(norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features)  # type: ignore[arg-type]


def _common(norm: nn.Module) -> dict[str, Any]:
    """What the constructors of all four take."""
    like = next((t for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()), torch.empty(0))
    affine = any(norm._parameters[name] is not None for name in ("weight", "bias"))
    return {"eps": norm.eps, "affine": affine, "device": like.device, "dtype": like.dtype}


def _carry_(new: Norm, norm: nn.Module, *, verb: str) -> Norm:
    """Give `new` the scale and shift per channel, and the mode, of `norm`; returns `new`."""
    for name in ("weight", "bias"):
        new._parameters[name] = _per_channel(norm._parameters[name], verb=verb, layer=type(norm).__name__)
    return new.train(norm.training)


def _per_channel(parameter: nn.Parameter | None, *, verb: str, layer: str) -> nn.Parameter | None:
    if parameter is None or parameter.dim() == 1:
        return parameter
    values = parameter.detach().flatten(1)
    if not (values.is_meta or bool((values == values[:, :1]).all())):
        why = "its scale or shift differs between the positions of a channel, which only a layer norm can have"
        raise NotApplicableError(verb, layer, why, "Average them first, and measure what that changes.")
    return nn.Parameter(values[:, 0].clone(), requires_grad=parameter.requires_grad)


def _per_element(parameter: nn.Parameter | None, shape: tuple[int, ...]) -> nn.Parameter | None:
    if parameter is None or len(shape) == 1:
        return parameter
    values = parameter.detach().view(-1, *[1] * (len(shape) - 1)).expand(shape)
    return nn.Parameter(values.clone(memory_format=torch.contiguous_format), requires_grad=parameter.requires_grad)
