"""How far the weights of one model or file are from those of another: how far training moved them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gonio.errors import GonioError, InvalidArgumentError, listing
from gonio.geometry import Layout, angle_between, filter_norms, matrix_view
from gonio.measuring.differences import Differences, TensorDifference
from gonio.measuring.entry import Entry
from gonio.measuring.numbers import numbers_of
from gonio.measuring.source import Source, contents_of, name_of
from gonio.measuring.spectra import rank_holding, spectra_of

__all__ = ["difference"]


def difference(before: Source, after: Source, *, progress: Callable[[int, int], None] | None = None) -> Differences:
    r"""Compare two models, state dicts or files tensor by tensor: norms and directions apart.

    For each filter the ratio of the norms and the angle between :math:`w` before and after; for each tensor the
    relative change :math:`\lVert W' - W \rVert / \lVert W \rVert`. A change of direction can change the function
    of a layer that a normalisation follows; a change of norm there only changes the step size. The rank of
    :math:`W' - W` says how few directions hold the change: fine-tuning with adapters of rank r cannot exceed r.

    Args:
        before, after: anything that :func:`gonio.measure` takes. Tensors are matched by name.
        progress: called after each tensor with how many are done and how many there are.

    Returns:
        :class:`Differences`; a tensor that only one source has, or whose shapes differ, is listed with the reason.

    Raises:
        InvalidArgumentError: as :func:`gonio.measure`, and if the two have no tensor of the same name.
        UnreadableFileError: as :func:`gonio.measure`.

    Example:
        >>> layer = nn.Linear(8, 4)
        >>> before = {name: value.clone() for name, value in layer.state_dict().items()}
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(3.0)
        >>> moved = gonio.measuring.difference(before, layer)["weight"]
        >>> round(moved.norm_ratio, 4), round(moved.angle_max, 3), round(moved.relative, 4)
        (3.0, 0.0, 2.0)
        >>> with torch.no_grad():
        ...     _ = layer.weight.copy_(before["weight"]).add_(torch.ones(4, 1) @ torch.ones(1, 8))
        >>> gonio.measuring.difference(before, layer)["weight"].rank_99
        1

    References:
        [1] E. J. Hu et al., "LoRA: Low-rank adaptation of large language models", 2021, arXiv 2106.09685, §4.1.
    """
    left, right = ({entry.name: entry for entry in contents_of(source).entries} for source in (before, after))
    if not left.keys() & right.keys():
        raise InvalidArgumentError(
            "difference() matches tensors by name",
            f"no name in common: {listing(list(left), limit=3)} before, {listing(list(right), limit=3)} after",
            "Rename the keys of one of them.",
        )
    made, names = [], [*left, *(name for name in right if name not in left)]
    for done, name in enumerate(names, start=1):
        made.append(_compare(name, left.get(name), right.get(name)))
        if progress is not None:
            progress(done, len(names))
    return Differences(name_of(before), name_of(after), tuple(made))


@torch.no_grad()
def _compare(name: str, before: Entry | None, after: Entry | None) -> TensorDifference:
    if before is None or after is None:
        return _left_out(name, f"only {'after' if before is None else 'before'}")
    a, b = _numbers(before, "before"), _numbers(after, "after")
    if isinstance(a, str) or isinstance(b, str):
        return _left_out(name, a if isinstance(a, str) else str(b))
    if a.shape != b.shape:
        return _left_out(name, f"shape {tuple(a.shape)} before, {tuple(b.shape)} after")
    shape, dtype = tuple(a.shape), torch.promote_types(a.dtype, b.dtype)
    a, b = a.to(dtype), b.to(a.device, dtype)
    if torch.equal(a, b):
        return TensorDifference(name=name, path=_path(name), status="equal", shape=shape, relative=0.0)
    values = _filters(a, b, _better(before, after), name)
    return TensorDifference(
        name=name, path=_path(name), status="compared", shape=shape, relative=_relative(a, b), **values
    )


def _path(name: str) -> str:
    return name.removesuffix(".weight")


def _left_out(name: str, reason: str) -> TensorDifference:
    return TensorDifference(name=name, path=_path(name), status="not compared", reason=reason)


def _better(before: Entry, after: Entry) -> Entry:
    """The entry whose layout is known from its layer, where the other's was guessed from its shape."""
    guessed = before.layout is None or (before.layout == Layout() and after.layout is not None)
    return after if guessed else before


def _numbers(entry: Entry, when: str) -> Tensor | str:
    """The values in float32 at least, all of them finite, or why there are none."""
    if entry.load is None:
        return entry.reason
    try:
        found = numbers_of(entry.load())
    except (GonioError, RuntimeError, ValueError, TypeError, OSError) as error:
        return f"cannot be read: {error}"
    if found.tensor is None:
        return found.reason
    if not bool(torch.isfinite(found.tensor).all()):
        return f"NaN or infinite values {when}"
    return found.tensor.to(torch.promote_types(found.tensor.dtype, torch.float32))


def _relative(a: Tensor, b: Tensor) -> float | None:
    size = float(torch.linalg.vector_norm(a, dtype=torch.float64))
    moved = float(torch.linalg.vector_norm(b - a, dtype=torch.float64))
    return moved / size if size else None


def _filters(a: Tensor, b: Tensor, entry: Entry, name: str) -> dict[str, Any]:
    if entry.layout is None or a.ndim < 2:
        return {}
    before, after = (matrix_view(tensor, entry.layout) for tensor in (a, b))
    return {**_turned(before.flatten(0, 1), after.flatten(0, 1)), **_ranks(after - before, name)}


def _turned(before: Tensor, after: Tensor) -> dict[str, float]:
    """Norms and angles of the filters that are not zero in either."""
    norms_before, norms_after = filter_norms(before), filter_norms(after)
    alive = (norms_before > 0) & (norms_after > 0)
    if not bool(alive.any()):
        return {}
    degrees = torch.rad2deg(angle_between(before[alive], after[alive]))
    return {
        "norm_ratio": float((norms_after[alive] / norms_before[alive]).median()),
        "angle_mean": float(degrees.mean()),
        "angle_max": float(degrees.max()),
    }


def _ranks(change: Tensor, name: str) -> dict[str, Any]:
    """Ranks of the change as one block-diagonal matrix, beside those of independent entries."""
    _, n, d = change.shape
    total = float(torch.linalg.vector_norm(change, dtype=torch.float64))
    if not total:
        return {}
    found = spectra_of(change, name=name)
    return {
        "stable_rank": (total / found.largest) ** 2,
        "stable_rank_random": change.numel() / (n**0.5 + d**0.5) ** 2,
        "rank_99": rank_holding(change, found, 0.99, name=name),
    }
