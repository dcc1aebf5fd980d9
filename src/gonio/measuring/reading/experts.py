"""Stacks of experts: tensors (experts, outputs, inputs), or (experts, inputs, outputs), read as a matrix for each.

Names do not tell them. What does is the router beside them, a matrix (experts, width), together with the shapes of the
stacks of one block: a fused gate has twice the units of the matrix that leads back, and of three matrices with the same
units two lead to the units. A bias with a row for each expert tells its own stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import prod

from gonio.geometry import Layout
from gonio.measuring.reading.entry import Shapes, TensorEntry, has_bias

_UPWARDS = 2  # modules above the one around a router in which its experts are looked for
_MATRICES = 3  # of an expert: to the gate, to the units and back


@dataclass(frozen=True)
class Stack:
    """A stack of matrices of one shape.

    Attributes:
        inputs_first: whether it is stored as (experts, inputs, outputs).
        told: what tells the axes.
    """

    shape: tuple[int, ...]
    inputs_first: bool
    told: str

    def entry(self, entry: TensorEntry) -> TensorEntry:
        """The entry of the tensor as matrices one below the other, with outputs on rows."""
        load = entry.load
        experts, first, second = self.shape
        if load is None:
            return entry
        rows, columns = (second, first) if self.inputs_first else (first, second)
        order = "inputs, outputs" if self.inputs_first else "outputs, inputs"
        note = f"{experts} experts of the shape ({order}), a matrix each: {self.told}"
        return replace(
            entry,
            kind="experts",
            layout=Layout(blocks=experts),
            load=lambda: (load().mT if self.inputs_first else load()).flatten(0, 1),
            reason="",
            notes=(*entry.notes, note),
            shape=(experts * rows, columns),
            inferred=True,
        )


def stacks_in(shapes: Shapes, unread: Iterable[str]) -> dict[str, Stack]:
    """The stacks of experts among tensors, by name.

    Args:
        shapes: of all tensors of a file or model. `unread`: those whose axes are not known otherwise.

    Example:
        >>> from gonio.measuring.reading.experts import stacks_in
        >>> shapes = {"gate.weight": (4, 32), "experts.up": (4, 96, 32), "experts.down": (4, 32, 48)}
        >>> {name: stack.inputs_first for name, stack in stacks_in(shapes, shapes).items()}
        {'experts.up': False, 'experts.down': False}
    """
    candidates = [name for name in unread if len(shape := shapes.get(name, ())) == 3 and shape[0] > 1]
    found = {name: stack for name in candidates if (stack := _by_its_bias(name, shapes)) is not None}
    for group, width in _routed(candidates, shapes):
        for name, inputs_first in _axes(group, width, shapes).items():
            found.setdefault(name, Stack(shapes[name], inputs_first, "the router and the other matrices tell"))
        agreed = {found[name].inputs_first for name in group if name in found}
        for name in group:
            if len(agreed) == 1 and name not in found and shapes[name][1] == shapes[name][2]:
                found[name] = Stack(shapes[name], min(agreed), "square, so as the other matrices of its block")
    return found


def untold(name: str, shapes: Shapes) -> bool:
    """Whether a tensor without a bias may be a stack as well as a convolution's kernels."""
    return len(shapes.get(name, ())) == 3 and not has_bias(name, shapes)


def _by_its_bias(name: str, shapes: Shapes) -> Stack | None:
    """The stack whose bias has a row for each expert; None without one, or if both axes are as long as it."""
    path, _, last = name.rpartition(".")
    beside = f"{path}.bias" if last == "weight" else f"{name}_bias"
    shape, bias = shapes[name], shapes.get(beside, ())
    if len(bias) != 2 or bias[0] != shape[0] or shape[1] == shape[2] or bias[1] not in shape[1:]:
        return None
    return Stack(shape, bias[1] == shape[2], "its bias tells")


def _routed(candidates: list[str], shapes: Shapes) -> Iterator[tuple[list[str], int]]:
    """The stacks of each block with a router, and the width that the router reads."""
    if not candidates:
        return
    counts = {shapes[name][0] for name in candidates}
    seen: set[tuple[str, ...]] = set()
    for router, shape in shapes.items():
        if len(shape) != 2 or not counts & set(shape) or shape[0] == shape[1]:
            continue
        for place in islice(_above(router), _UPWARDS + 1):
            group = [name for name in candidates if name.startswith(place) and shapes[name][0] in shape]
            if not group:
                continue
            experts = shapes[group[0]][0]
            width = shape[1] if shape[0] == experts else shape[0]
            fits = all(shapes[name][0] == experts and width in shapes[name][1:] for name in group)
            if fits and len(group) <= _MATRICES and tuple(group) not in seen:
                seen.add(tuple(group))
                yield group, width
            break


def _above(name: str) -> Iterator[str]:
    """The prefixes of the modules around a tensor, from the one around its own module outwards."""
    parts = name.split(".")[:-1]
    while parts:
        parts = parts[:-1]
        yield "".join(f"{part}." for part in parts)


def _axes(group: list[str], width: int, shapes: Shapes) -> dict[str, bool]:
    """Whether stacks have their inputs first, for those of a block whose shapes tell it."""
    units = {name: prod(shapes[name][1:]) // width for name in group}
    wide = {name: shapes[name][1] == width for name in group}  # the width is the first axis of its matrices
    few, many = min(units.values()), max(units.values())
    back: list[str] = []
    if len(group) == 2 and many == 2 * few:
        back = [name for name in group if units[name] == few]
    elif len(group) == _MATRICES and few == many:
        back = [name for name in group if list(wide.values()).count(wide[name]) == 1]
    if len(back) != 1:
        return {}
    return {name: wide[name] != (name in back) for name in group if shapes[name][1] != shapes[name][2]}
