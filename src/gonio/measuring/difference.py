"""How far the weights of one model or file are from those of another: how far training moved them."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from gonio.errors import GonioError, UnknownNameError, listing
from gonio.foreign_text import plain, shorten
from gonio.geometry import Layout, angle_between, filter_norms, matrix_view
from gonio.measuring.columns import number
from gonio.measuring.entry import Entry
from gonio.measuring.numbers import numbers_of
from gonio.measuring.source import Source, contents_of, name_of

__all__ = ["Differences", "TensorDifference", "difference"]


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    r"""One tensor of both sources.

    Attributes:
        status: `compared`, `equal` (every value), or `not compared`, with the reason.
        relative: :math:`\lVert W' - W \rVert / \lVert W \rVert`; None from a zero tensor.
        norm_ratio: median over filters of the norm after over the norm before.
        angle_mean, angle_max: between each filter before and after, in degrees; 90 for independent directions.
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


@dataclass(frozen=True, repr=False)
class Differences:
    """Every tensor that either source has; a mapping by path that prints as a table."""

    before: str
    after: str
    tensors: tuple[TensorDifference, ...]

    def __getitem__(self, path: str) -> TensorDifference:
        for tensor in self.tensors:
            if path in (tensor.path, tensor.name):
                return tensor
        raise UnknownNameError("tensor", path, [tensor.path for tensor in self.tensors])

    def __iter__(self) -> Iterator[TensorDifference]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def coverage(self) -> str:
        """How many tensors were compared, and why the others were not."""
        equal = sum(t.status == "equal" for t in self.tensors)
        compared = equal + sum(t.status == "compared" for t in self.tensors)
        left = [f"{plain(t.path)}: {plain(t.reason)}" for t in self.tensors if t.status == "not compared"]
        rest = f"{len(left)} are not: {listing(left, limit=5)}" if left else "none is left out"
        return f"{compared} of {len(self.tensors)} tensors are compared, {equal} of them are equal; {rest}."

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data."""
        return {"schema": "gonio.difference/1", **asdict(self)}

    def __str__(self) -> str:
        width = shutil.get_terminal_size((100, 24)).columns
        console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
        console.print(self)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.rstrip("\n").splitlines())

    def __repr__(self) -> str:
        return f"<Differences of {len(self.tensors)} tensors>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(f"{plain(self.before)} → {plain(self.after)}", style="bold")
        yield Text("")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("tensor", no_wrap=True)
        for title in ("change", "norm ratio", "angle", "largest"):
            table.add_column(title, justify="right", no_wrap=True)
        for t in self.tensors:
            if t.status == "compared":
                cells = (number(t.relative), number(t.norm_ratio), _degrees(t.angle_mean), _degrees(t.angle_max))
                table.add_row(shorten(t.path, longest=max(12, options.max_width // 3)), *cells)
        if table.row_count:
            yield table
            yield Text("")
        yield Text(self.coverage, style="dim")


def _degrees(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}°"


def difference(before: Source, after: Source) -> Differences:
    r"""Compare two models, state dicts or files tensor by tensor: norms and directions apart.

    For each filter the ratio of the norms and the angle between :math:`w` before and after; for each tensor the
    relative change :math:`\lVert W' - W \rVert / \lVert W \rVert`. A change of direction can change the function
    of a layer that a normalisation follows; a change of norm there only changes the step size.

    Args:
        before, after: anything that :func:`gonio.measure` takes. Tensors are matched by name.

    Returns:
        :class:`Differences`; a tensor that only one source has, or whose shapes differ, is listed with the reason.

    Raises:
        InvalidArgumentError, UnreadableFileError: as :func:`gonio.measure`.

    Example:
        >>> layer = nn.Linear(8, 4)
        >>> before = {name: value.clone() for name, value in layer.state_dict().items()}
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(3.0)
        >>> moved = gonio.measuring.difference(before, layer)["weight"]
        >>> round(moved.norm_ratio, 4), round(moved.angle_max, 3), round(moved.relative, 4)
        (3.0, 0.0, 2.0)
    """
    left, right = ({entry.name: entry for entry in contents_of(source).entries} for source in (before, after))
    names = [*left, *(name for name in right if name not in left)]
    return Differences(
        name_of(before), name_of(after), tuple(_compare(name, left.get(name), right.get(name)) for name in names)
    )


@torch.no_grad()
def _compare(name: str, before: Entry | None, after: Entry | None) -> TensorDifference:
    path = name.removesuffix(".weight")
    if before is None or after is None:
        where = "after" if before is None else "before"
        return TensorDifference(name=name, path=path, status="not compared", reason=f"only {where}")
    a, b = _numbers(before), _numbers(after)
    if isinstance(a, str) or isinstance(b, str):
        reason = a if isinstance(a, str) else str(b)
        return TensorDifference(name=name, path=path, status="not compared", reason=reason)
    if a.shape != b.shape:
        reason = f"shape {tuple(a.shape)} before, {tuple(b.shape)} after"
        return TensorDifference(name=name, path=path, status="not compared", reason=reason)
    shape = tuple(a.shape)
    if torch.equal(a, b):
        return TensorDifference(name=name, path=path, status="equal", shape=shape, relative=0.0)
    values = _filters(a, b, _better(before, after))
    return TensorDifference(name=name, path=path, status="compared", shape=shape, relative=_relative(a, b), **values)


def _better(before: Entry, after: Entry) -> Entry:
    """The entry whose layout is known from its layer, where the other's was guessed from its shape."""
    guessed = before.layout is None or (before.layout == Layout() and after.layout is not None)
    return after if guessed else before


def _numbers(entry: Entry) -> Tensor | str:
    if entry.load is None:
        return entry.reason
    try:
        found = numbers_of(entry.load())
    except (GonioError, RuntimeError, ValueError, TypeError, OSError) as error:
        return f"cannot be read: {error}"
    return found.reason if found.tensor is None else found.tensor.float()


def _relative(a: Tensor, b: Tensor) -> float | None:
    size = float(torch.linalg.vector_norm(a.double()))
    moved = float(torch.linalg.vector_norm(b.double() - a.double()))
    return moved / size if size else None


def _filters(a: Tensor, b: Tensor, entry: Entry) -> dict[str, Any]:
    if entry.layout is None or a.ndim < 2:
        return {}
    before, after = (matrix_view(tensor, entry.layout).flatten(0, 1) for tensor in (a, b))
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
