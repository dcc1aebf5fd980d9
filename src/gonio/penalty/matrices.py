"""Which weights are matrices for orthogonalised updates (Muon), and into which blocks each is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from gonio.editing.where import Site, sites, unwrapped
from gonio.errors import InvalidArgumentError
from gonio.geometry.views import PLAIN, Layout, matrix_view, unview, view_shape, why_not_dense
from gonio.penalty.decay import Groups, check_decay, decay_reasons, weights_and_tables, why_no_weight
from gonio.penalty.output_layers import roles_of
from gonio.penalty.penalty import Penalty
from gonio.penalty.weights import WeightRef, weights_of
from gonio.surgery.blocks import Anatomy
from gonio.surgery.facts import TABLES
from gonio.surgery.stated import EXPERTS, HEADS, stated_number, stated_rows


@dataclass(frozen=True)
class Blocks:
    """How a weight is cut into the matrices that are orthogonalised, each by itself.

    Attributes:
        matrices: equal parts of dim 0: groups of a convolution, gates of an LSTM.
        transposed: whether filters are on dim 1 of each part, or on dim 2 of a stacked weight.
        rows: sizes into which the filters of a part are cut, repeated until all are; () for no further cut. The heads
            of queries, keys and values are consecutive rows in every order of packing, and so are gate and up.
        stacked: whether dim 0 of a weight in three dimensions counts matrices, as for stacked experts.

    Example:
        >>> from gonio.penalty.matrices import Blocks
        >>> [part.shape for part in Blocks(rows=(2,)).split(torch.randn(6, 4))]
        [torch.Size([3, 2, 4])]
    """

    matrices: int = 1
    transposed: bool = False
    rows: tuple[int, ...] = ()
    stacked: bool = False

    @classmethod
    def of(cls, code: Sequence[int]) -> Blocks:
        """The blocks of a :attr:`code`."""
        return cls(code[0], bool(code[1]), tuple(code[3:]), bool(code[2]))

    @property
    def code(self) -> tuple[int, ...]:
        """The same as plain numbers, for the state of an optimizer."""
        return (self.matrices, int(self.transposed), int(self.stacked), *self.rows)

    @property
    def _layout(self) -> Layout:
        return Layout(transposed=self.transposed, groups=self.matrices) if not self.stacked else PLAIN

    def split(self, weight: Tensor) -> list[Tensor]:
        """The blocks as stacks of matrices (number, rows, columns), one stack for each size in `rows`."""
        view = matrix_view(weight, self._layout) if not self.stacked else weight.mT if self.transposed else weight
        if not self.rows:
            return [view]
        return list(view.unflatten(1, (-1, sum(self.rows))).flatten(0, 1).split(self.rows, dim=1))

    def join(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """A weight of the shape of `like` from its blocks: the inverse of :meth:`split`."""
        if self.stacked:
            joined = torch.cat(list(parts), 1).reshape((like.mT if self.transposed else like).shape)
            return joined.mT if self.transposed else joined
        filters = like.shape[1] if self.transposed else like.shape[0] // self.matrices
        return unview(torch.cat(list(parts), 1).reshape(self.matrices, filters, -1), like.shape, self._layout)


@dataclass(frozen=True, repr=False)
class MatrixGroups(Groups):
    """Parameter groups for :class:`gonio.optim.Muon`; printing them says what is a matrix, and why others are not.

    Attributes:
        groups: the matrices with their blocks, then the other parameters.
        matrices: by name, how each is cut.
        others: by name, why each is not a matrix.
        notes: what is not known of the model.

    Example:
        >>> groups = gonio.param_groups(nn.LSTM(4, 6, bias=False), matrices=True)
        >>> dict(groups.matrices)
        {'weight_ih_l0': '4 matrices 6×4', 'weight_hh_l0': '4 matrices 6×6'}
    """

    matrices: Mapping[str, str]
    others: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = max((len(name) for name in (*self.matrices, *self.others)), default=0)
        lines = [f"  {name:<{width}}  {how}" for name, how in self.matrices.items()]
        lines += [f"  {name:<{width}}  not a matrix: {why}" for name, why in self.others.items()]
        count, rest = len(self.matrices), len(self.others)
        head = f"{count} {'matrix' if count == 1 else 'matrices'}, {rest} other parameter{'s' * (rest != 1)}"
        return "\n".join([head, *lines, *(f"  note: {note}" for note in self.notes)])


def matrix_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    penalty: Penalty | None = None,
    heads: Mapping[str, int] | Anatomy | None = None,
) -> MatrixGroups:
    """Groups for an optimizer that orthogonalises updates, such as :class:`gonio.optim.Muon`.

    First come the weights that are matrices, and the blocks into which each is cut. Convolutions are matrices of
    flattened filters; cut are their groups, the gates of recurrent layers, stacked experts, and queries, keys and
    values that one layer computes, head by head, where the type of the attention is registered
    (:func:`gonio.surgery.facts.register`) or its anatomy is given; in other types such a layer stays whole, as do gate
    and up in one layer without an anatomy. A run of the model on shapes alone finds the output layers, and parameters
    of two dimensions that are in no known layer, but which linear functions take whole (``x @ w``, ``F.linear``) and
    nothing else does: those are matrices, too. Not matrices are embeddings and what is tied to them, what computes an
    output, depthwise filters, norms and biases.

    Args:
        weight_decay: of the matrices and of what decays among the others; None for the optimizer's default for
            matrices, and 0 for the others.
        penalty: weights under its terms on scale do not decay as well.
        heads: rows per head of layers (by a glob over paths) whose modules do not have the number; or what
            :func:`gonio.surgery.anatomy` has found, instead of what types state.

    Raises:
        InvalidArgumentError: as :func:`decay_groups`, and if `heads` do not divide a weight or match no layer.

    Example:
        >>> from gonio.penalty import matrix_groups
        >>> print(matrix_groups(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4))))
        1 matrix, 3 other parameters
          0.weight  matrix 8×27
          0.bias    not a matrix: a bias
          2.weight  not a matrix: the output layer
          2.bias    not a matrix: a bias
    """
    check_decay(weight_decay)
    reasons, heads = decay_reasons(model, penalty), heads or {}
    parameters = dict(model.named_parameters())
    kinds, notes = _kinds(model, reasons, heads)
    cuts = {name: kind for name, kind in kinds.items() if isinstance(kind, Blocks)}
    others = {name: kind for name, kind in kinds.items() if isinstance(kind, str)}
    first: dict[str, Any] = {"params": [parameters[name] for name in cuts], "matrices": True}
    first["blocks"] = [blocks.code for blocks in cuts.values()]
    if weight_decay is not None:
        first["weight_decay"] = weight_decay
    decayed = [parameters[name] for name in others if weight_decay and reasons[name] is None]
    spared = [parameters[name] for name in others if not (weight_decay and reasons[name] is None)]
    rest = [{"params": p, "matrices": False, "weight_decay": d} for p, d in ((decayed, weight_decay), (spared, 0.0))]
    groups = tuple(group for group in (first, *rest) if group["params"])
    return MatrixGroups(groups, {n: described(b, parameters[n]) for n, b in cuts.items()}, others, tuple(notes))


def _kinds(
    model: nn.Module, reasons: Mapping[str, str | None], heads: Mapping[str, int] | Anatomy
) -> tuple[dict[str, Blocks | str], list[str]]:
    """For each trained parameter by name its blocks, or why it is not a matrix; and what is not known of the model."""
    inner = unwrapped(model)
    everything = sites(inner)
    tables = {id(p): site.path for site in everything if isinstance(site.module, TABLES) for p in _own(site.module)}
    weights, _ = weights_and_tables(inner)
    refs = {id(p): ref for site in everything for ref in weights_of(site) for p in ref.parameters()}
    holders = {id(p): site.module for site in everything for p in _own(site.module)}
    parents = _parents(everything)
    roles = roles_of(inner)
    paths = [ref.path for ref in refs.values()]
    for glob in heads if isinstance(heads, Mapping) else ():
        if not any(fnmatchcase(path, glob) for path in paths):
            raise InvalidArgumentError("param_groups(heads=) names layers", repr(glob), "Pass globs over their paths.")
    notes = [f"no layer is left out as the output layer: {roles.unknown}"] if roles.unknown else []
    found: dict[str, Blocks | str] = {}
    for name, parameter in model.named_parameters():
        if name not in reasons:
            continue
        ref = refs.get(id(parameter))
        if id(parameter) in tables:
            tied = ref is not None and not isinstance(ref.module, TABLES)
            found[name] = f"tied to the table {tables[id(parameter)]}" if tied else "a table that is looked up"
        elif ref is None or id(parameter) not in weights:
            stated = _of_anatomy(heads, name, parameter) or _stacked(holders.get(id(parameter)), parameter)
            bare = _bare(parameter, roles.bare[id(parameter)]) if id(parameter) in roles.bare else None
            ends = id(parameter) in roles.ends
            found[name] = "the output layer" if ends else stated or bare or why_no_weight(name, parameter)
        elif id(ref.module) in roles.ends:
            found[name] = "the output layer"
        else:
            found[name] = _cut(ref, parameter, parents, heads)
    return found, [*notes, *([] if isinstance(heads, Anatomy) else _of_heads(inner, found))]


def _of_heads(model: nn.Module, found: Mapping[str, Blocks | str]) -> list[str]:
    """A note where the configuration states heads, and no weight is cut into them."""
    stated = stated_number(model, HEADS)
    if stated < 2 or any(isinstance(kind, Blocks) and kind.rows for kind in found.values()):
        return []
    how = "pass heads=gonio.surgery.anatomy(model), or heads={glob: rows per head}, to cut them"
    return [f"the model has {stated} attention heads, and the weights that compute them are whole: {how}"]


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


def _of_anatomy(heads: Mapping[str, int] | Anatomy, name: str, parameter: Tensor) -> Blocks | None:
    """A stack of matrices, as for experts, that an anatomy has found, with the sides on which it has their inputs."""
    if not isinstance(heads, Anatomy) or name not in dict(heads.stacks):
        return None
    units = heads.rows_of_units(name)
    return Blocks(parameter.shape[0], heads.stored_transposed(name), (units,) if units else (), stacked=True)


def _bare(parameter: Tensor, columns: bool) -> Blocks | str | None:
    """A parameter that linear functions take as a layer's weight, with filters in its rows or columns."""
    if (why := why_not_dense(parameter)) is not None:
        return why.removeprefix("its weight is ")
    return Blocks(transposed=columns) if min(parameter.shape) > 1 else None


def _stacked(holder: nn.Module | None, parameter: Tensor) -> Blocks | None:
    """A stack of experts: a parameter of three dimensions, of a module or a configuration with so many experts."""
    if holder is None or parameter.ndim != 3 or min(parameter.shape) < 2:
        return None
    known = stated_number(holder, EXPERTS) == parameter.shape[0]
    return Blocks(parameter.shape[0], stacked=True) if known else None


# --- blocks of one weight -----------------------------------------------------------------------------------------


def _parents(everything: Sequence[Site]) -> dict[int, list[nn.Module]]:
    """The modules around each module, the nearest first."""
    around: dict[int, list[nn.Module]] = {}
    for site in everything:
        nearest = site.owners[0][0] if site.owners else None
        around[id(site.module)] = [] if nearest is None else [nearest, *around[id(nearest)]]
    return around


def _cut(
    ref: WeightRef, parameter: Tensor, parents: Mapping[int, Sequence[nn.Module]], heads: Mapping[str, int] | Anatomy
) -> Blocks | str:
    layout = ref.layout
    if (why := why_not_dense(parameter)) is not None:
        return why.removeprefix("its weight is ")
    try:
        matrices, filters, columns = view_shape(parameter.shape, layout)
    except InvalidArgumentError:  # as the norms of a weight norm along another axis than that of the groups
        return "a part of a weight, which is no stack of filters"
    if filters == 1:
        return "depthwise: each filter is a matrix of one row" if matrices > 1 else "a matrix of one row"
    if columns == 1:
        return "a matrix of one column"
    rows = _rows_of_heads(ref, filters * layout.blocks, parents, heads)
    if layout.blocks > 1 and rows:  # packed q, k and v: a head is a part of one of them
        return Blocks(rows=rows)
    return Blocks(layout.matrices, layout.transposed, rows)


def _rows_of_heads(
    ref: WeightRef, filters: int, parents: Mapping[int, Sequence[nn.Module]], heads: Mapping[str, int] | Anatomy
) -> tuple[int, ...]:
    """The sizes of consecutive heads in a layer that computes q, k and v at once; none for other layers."""
    if isinstance(heads, Anatomy):
        sizes = heads.rows_of_heads(ref.label) or (heads.rows_of_units(ref.label),)
        return sizes if sum(sizes) and filters % sum(sizes) == 0 else ()
    asked = next((rows for glob, rows in heads.items() if fnmatchcase(ref.path, glob)), None)
    if asked is not None:
        if filters % asked:
            found = f"{filters} rows of {ref.label} in heads of {asked}"
            raise InvalidArgumentError("param_groups(heads=) takes rows per head", found, "Pass a divisor.")
        return (asked,)
    inputs = ref.tensor().shape[0 if ref.layout.transposed else 1]
    return stated_rows([ref.module, *parents[id(ref.module)]], ref.name, filters, inputs)


def described(blocks: Blocks, weight: Tensor) -> str:
    """The number and size of the blocks in words.

    Example:
        >>> from gonio.penalty.matrices import Blocks, described
        >>> described(Blocks(rows=(2,)), torch.empty(6, 4))
        '3 matrices 2×4'
    """
    sizes: dict[str, int] = {}
    for part in blocks.split(torch.empty(weight.shape, device="meta")):
        size = f"{part.shape[1]}×{part.shape[2]}"
        sizes[size] = sizes.get(size, 0) + part.shape[0]
    return ", ".join(f"{n} matrices {size}" if n > 1 else f"matrix {size}" for size, n in sizes.items())
