"""`difference`: how far the weights of one model or file are from those of another, norms and directions apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text
from torch import Tensor

from gonio.errors import GonioError, InvalidArgumentError
from gonio.escaping import markdown_cell, plain
from gonio.geometry import Layout, angle_between, filter_norms, matrix_view
from gonio.geometry.spectra import energy_rank, spectrum_estimate
from gonio.measuring.reading.entry import Entry, numbers_of
from gonio.measuring.reading.source import Source, contents_of, name_of, some
from gonio.measuring.showing.page import render
from gonio.measuring.showing.table import Column, Table, markdown_table, reasons, tensor_table


@dataclass(frozen=True, kw_only=True, repr=False)
class TensorDifference:
    r"""One tensor of both sources.

    Attributes:
        status: `compared`, `equal` (every value), or `not compared`, with the reason.
        relative: :math:`\lVert \Delta \rVert / \lVert W \rVert` with :math:`\Delta = W' - W`; None from a zero tensor.
        norm_ratio: median over filters of the norm after over the norm before.
        angle_mean, angle_max: between each filter before and after, in degrees; 90 for independent directions.
        stable_rank: :math:`\lVert \Delta \rVert^2 / \sigma_{\max}^2(\Delta)`. `stable_rank_random`: for a change with
            independent entries.
        rank_99: the smallest number of singular directions of :math:`\Delta` with 99 % of its squared norm, so that the
            best approximation of this rank has a relative error of 0.1; None where it is above 256 in a
            weight too large for all singular values.
    """

    name: str
    path: str
    status: str
    reason: str = ""
    shape: tuple[int, ...] = ()
    relative: float | None = None
    norm_ratio: float | None = None
    angle_mean: float | None = None
    angle_max: float | None = None
    stable_rank: float | None = None
    stable_rank_random: float | None = None
    rank_99: int | None = None

    def __repr__(self) -> str:
        change = "" if self.relative is None else f", changed by {self.relative:.3g}"
        return f"<{plain(self.path)}: {plain(self.reason) or self.status}{change}>"


def _degrees(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}°"


C = Column[TensorDifference]
COLUMNS: tuple[Column[TensorDifference], ...] = (
    C("shape", "shape", "of the tensor", 14, lambda t: "×".join(map(str, t.shape))),
    C("relative", "change", "norm of the difference over the norm before", 7),
    C("norm_ratio", "norm ratio", "median over filters of the norm after over before", 10),
    C("angle_mean", "angle", "between each filter before and after: mean", 6, lambda t: _degrees(t.angle_mean)),
    C("angle_max", "largest", "the largest of these angles", 7, lambda t: _degrees(t.angle_max)),
    C("stable_rank", "s.rank", "stable rank of the difference", 6),
    C("stable_rank_random", "chance", "stable rank of a random difference", 6),
    C("rank_99", "rank 99%", "singular directions with 99 % of its squared norm", 8, lambda t: str(t.rank_99 or "–")),
)
KEPT = ("relative", "norm_ratio", "angle_mean", "angle_max", "rank_99", "stable_rank", "stable_rank_random")


@dataclass(frozen=True, repr=False)
class Differences(Table[TensorDifference]):
    """Every tensor of either source: a mapping from paths to rows that prints as a table.

    Attributes:
        before, after: the names of the sources.
        tensors: one :class:`TensorDifference` each, in the order of `before`, then those only in `after`.

    Example:
        >>> found = gonio.measuring.difference({"a.weight": torch.eye(4)}, {"a.weight": 2 * torch.eye(4)})
        >>> found, found["a"].norm_ratio
        (<Differences of 1 tensors>, 2.0)
    """

    ROW: ClassVar = TensorDifference

    before: str
    after: str
    tensors: tuple[TensorDifference, ...]

    @property
    def moved(self) -> tuple[TensorDifference, ...]:
        """The tensors that differ and could be compared."""
        return tuple(tensor for tensor in self.tensors if tensor.status == "compared")

    @property
    def coverage(self) -> str:
        """How many tensors were compared, and why the others were not."""
        equal = sum(t.status == "equal" for t in self.tensors)
        left = reasons([t for t in self.tensors if t.status == "not compared"])
        said = f"Compared: {equal + len(self.moved)} of {len(self.tensors)} tensors, of which {equal} are equal."
        return f"{said} Not compared: {left or 'none'}."

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data; `schema` names its version."""
        return {"schema": "gonio.difference/1", "coverage": self.coverage, **asdict(self)}

    def to_markdown(self) -> str:
        """The table of the tensors that changed, and the coverage."""
        head = f"**{markdown_cell(self.before)} → {markdown_cell(self.after)}**"
        table = markdown_table("tensor", self.moved, COLUMNS)
        return "\n".join([head, "", *table, "", markdown_cell(self.coverage), ""])

    def to_html(self) -> str:
        """One self-contained page without scripts and network access."""
        return render("differences.html.j2", whole=True, d=self, columns=COLUMNS)

    def _repr_html_(self) -> str:
        return render("differences.html.j2", whole=False, d=self, columns=COLUMNS)

    def __repr__(self) -> str:
        return f"<Differences of {len(self.tensors)} tensors>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(f"{plain(self.before)} → {plain(self.after)}", style="bold")
        yield Text("")
        if self.moved:
            yield tensor_table("tensor", self.moved, COLUMNS, KEPT, options.max_width)
            yield Text("")
        yield Text(self.coverage, style="dim")


def difference(before: Source, after: Source, *, progress: Callable[[int, int], None] | None = None) -> Differences:
    r"""Compare two models, state dicts or files tensor by tensor, norms and directions apart.

    For each filter the ratio of the norms and the angle between :math:`w` before and after; for each tensor the
    relative change :math:`\lVert W' - W \rVert / \lVert W \rVert`. A change of direction can change the function
    of a layer that a normalisation follows; a change of norm there only changes the step size. The rank of
    :math:`W' - W` is the number of directions of the change: at most r after fine-tuning with adapters of rank r.

    Args:
        before, after: anything that :func:`gonio.measure` takes. Tensors are matched by name.
        progress: called after each tensor with the number done and the number in all.

    Returns:
        :class:`Differences`; a tensor of only one source, or of different shapes, is listed with the reason.

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
            f"no name in common: {some(left)} before, {some(right)} after",
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
    known: dict[str, Any] = {"name": name, "path": name.removesuffix(".weight"), "status": "not compared"}
    if before is None or after is None:
        return TensorDifference(**known, reason=f"only {'after' if before is None else 'before'}")
    a, b = _numbers(before, "before"), _numbers(after, "after")
    if isinstance(a, str) or isinstance(b, str):
        return TensorDifference(**known, reason=a if isinstance(a, str) else str(b))
    if a.shape != b.shape:
        return TensorDifference(**known, reason=f"shape {tuple(a.shape)} before, {tuple(b.shape)} after")
    dtype = torch.promote_types(a.dtype, b.dtype)
    a, b = a.to(dtype), b.to(a.device, dtype)
    if torch.equal(a, b):
        return TensorDifference(**{**known, "status": "equal"}, shape=tuple(a.shape), relative=0.0)
    size, moved = (float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in (a, b - a))
    values: dict[str, Any] = {"shape": tuple(a.shape), "relative": moved / size if size else None}
    inferred = before.layout is None or (before.layout == Layout() and after.layout is not None)  # from its shape
    layout = after.layout if inferred else before.layout
    if layout is not None and a.ndim > 1:
        old, new = matrix_view(a, layout), matrix_view(b, layout)
        values |= _turned(old.flatten(0, 1), new.flatten(0, 1)) | _ranks(new - old, name)
    return TensorDifference(**{**known, "status": "compared"}, **values)


def _numbers(entry: Entry, when: str) -> Tensor | str:
    """The values in float32 or float64, all finite, or the reason why there are none."""
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
    """Ranks of the change as one block-diagonal matrix, beside that of independent entries."""
    _, n, d = change.shape
    total = float(torch.linalg.vector_norm(change, dtype=torch.float64))
    if not total:
        return {}
    found = spectrum_estimate(change, name=name)
    return {
        "stable_rank": found.stable_rank(total),
        "stable_rank_random": change.numel() / (n**0.5 + d**0.5) ** 2,
        "rank_99": energy_rank(change, found, 0.99, name=name),
    }
