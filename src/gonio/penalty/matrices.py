"""Which weights are matrices for orthogonalised updates (Muon), and into which blocks each is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, overload

import torch
from torch import Tensor, nn

from gonio.editing.where import Site, sites
from gonio.editing.wrapping import unwrapped
from gonio.errors import InvalidArgumentError
from gonio.geometry.views import PLAIN, Layout, matrix_view, unview
from gonio.penalty.terms import TABLES, WeightRef, weights_of


@dataclass(frozen=True)
class Blocks:
    """How a weight is cut into the matrices that are orthogonalised, each by itself.

    Attributes:
        matrices: equal parts of dim 0: groups of a convolution, gates of an LSTM.
        transposed: whether filters are on dim 1 of each part.
        rows: sizes into which the filters of a part are cut, repeated until all are; () for no further cut. The heads
            of queries, keys and values are consecutive rows in every order in which they are packed.
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
        view = weight if self.stacked else matrix_view(weight, self._layout)
        if not self.rows:
            return [view]
        return list(view.unflatten(1, (-1, sum(self.rows))).flatten(0, 1).split(self.rows, dim=1))

    def join(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """A weight of the shape of `like` from its blocks: the inverse of :meth:`split`."""
        if self.stacked:
            return parts[0]
        filters = like.shape[1] if self.transposed else like.shape[0] // self.matrices
        return unview(torch.cat(list(parts), 1).reshape(self.matrices, filters, -1), like.shape, self._layout)


@dataclass(frozen=True)
class Groups(Sequence[dict[str, Any]]):
    """Parameter groups, which an optimizer takes like a list of them."""

    groups: tuple[dict[str, Any], ...]

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        return self.groups[index]

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(frozen=True)
class MatrixGroups(Groups):
    """Parameter groups for :class:`gonio.optim.Muon`; printing them says what is a matrix, and why others are not.

    Attributes:
        groups: the matrices with their blocks, then the other parameters.
        matrices: by name, how each is cut.
        others: by name, why each is not a matrix.

    Example:
        >>> groups = gonio.param_groups(nn.LSTM(4, 6, bias=False), matrices=True)
        >>> dict(groups.matrices)
        {'weight_ih_l0': '4 matrices 6×4', 'weight_hh_l0': '4 matrices 6×6'}
    """

    matrices: Mapping[str, str]
    others: Mapping[str, str]

    def __str__(self) -> str:
        width = max((len(name) for name in (*self.matrices, *self.others)), default=0)
        lines = [f"  {name:<{width}}  {how}" for name, how in self.matrices.items()]
        lines += [f"  {name:<{width}}  not a matrix: {why}" for name, why in self.others.items()]
        return "\n".join([f"{len(self.matrices)} matrices, {len(self.others)} other parameters", *lines])


def matrix_groups(
    model: nn.Module, reasons: Mapping[str, str | None], weight_decay: float | None, heads: Mapping[str, int]
) -> MatrixGroups:
    """The groups of `param_groups(matrices=True)`.

    `reasons`: of each trained parameter by name, why it does not decay, or None. `heads`: by glob, rows per head.
    """
    parameters = dict(model.named_parameters())
    kinds = _kinds(model, reasons, heads)
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
    return MatrixGroups(groups, {n: described(b, parameters[n]) for n, b in cuts.items()}, others)


def _kinds(model: nn.Module, reasons: Mapping[str, str | None], heads: Mapping[str, int]) -> dict[str, Blocks | str]:
    """For each trained parameter by name: its blocks, or why it is not a matrix."""
    inner = unwrapped(model)
    everything = sites(inner)
    tables = {id(p): site.path for site in everything if isinstance(site.module, TABLES) for p in _own(site.module)}
    refs = {id(p): ref for site in everything for ref in weights_of(site) for p in ref.parameters()}
    parents = _parents(everything)
    ends = _heads_of(inner, everything)
    paths = [ref.path for ref in refs.values()]
    for glob in heads:
        if not any(fnmatchcase(path, glob) for path in paths):
            raise InvalidArgumentError("param_groups(heads=) names layers", repr(glob), "Pass globs over their paths.")
    found: dict[str, Blocks | str] = {}
    for name, parameter in model.named_parameters():
        if name not in reasons:
            continue
        ref = refs.get(id(parameter))
        if id(parameter) in tables:
            tied = ref is not None and not isinstance(ref.module, TABLES)
            found[name] = f"tied to the table {tables[id(parameter)]}" if tied else "a table that is looked up"
        elif ref is None or reasons[name] == "one number per unit":
            found[name] = _stacked(name, parameter) or _why_none(name, parameter)
        elif id(ref.module) in ends:
            found[name] = "the output layer"
        else:
            found[name] = _cut(ref, parameter, parents, heads)
    return found


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


def _why_none(name: str, parameter: Tensor) -> str:
    if "bias" in name.rsplit(".", 1)[-1]:
        return "a bias"
    return "one number per unit" if sum(size > 1 for size in parameter.shape) < 2 else "no weight with filters"


def _stacked(name: str, parameter: Tensor) -> Blocks | None:
    """A stack of experts: a parameter of three dimensions of a module that is no known layer."""
    expert = parameter.ndim == 3 and "expert" in name.lower() and "bias" not in name.rsplit(".", 1)[-1]
    return Blocks(parameter.shape[0], stacked=True) if expert and min(parameter.shape[1:]) > 1 else None


# --- the output layer ---------------------------------------------------------------------------------------------

_OUTPUTS = frozenset(
    (
        *("head", "head_dist", "heads", "fc", "classifier", "lm_head", "embed_out", "score", "logits", "cls"),
        *("output_layer", "qa_outputs", "AuxLogits", "last_linear", "generator_lm_head", "final_layer", "last_layer"),
        "output_projection",
    )
)


def _heads_of(model: nn.Module, everything: Sequence[Site]) -> set[int]:
    """The output layers: those that the model names by a method, the last weights of modules with such a name, and the
    last weight of a plain sequence of layers."""
    named: list[nn.Module] = []
    for method in ("get_output_embeddings", "get_classifier"):  # of transformers and timm
        try:
            found = getattr(model, method)()
        except Exception:  # the model's own code; a name decides then
            continue
        named += [module for module in (found if isinstance(found, tuple) else (found,)) if module is not None]
    by_root: dict[str, list[nn.Module]] = {}
    for site in everything:
        root = site.path.split(".")[0]
        if root in _OUTPUTS and any(not isinstance(site.module, TABLES) for _ in weights_of(site)):
            by_root.setdefault(root, []).append(site.module)
    if isinstance(model, nn.Sequential):  # FSDP2 gives it a class of its own
        named.append(model)
    last = {id(modules[-1]) for modules in by_root.values()}
    return last | {id(part) for module in named for part in _last_weight(module)}


def _last_weight(module: nn.Module) -> list[nn.Module]:
    weighted = [site.module for site in sites(module) if any(True for _ in weights_of(site))]
    return weighted if isinstance(module, nn.ModuleList) else weighted[-1:]


# --- blocks of one weight -----------------------------------------------------------------------------------------

# Layers that compute queries, keys and values (or two of them) in one product, and how many.
_FUSED = {
    **dict.fromkeys(("qkv", "c_attn", "query_key_value", "qkv_proj", "Wqkv", "to_qkv", "in_proj", "attn_qkv"), 3),
    **dict.fromkeys(("kv", "to_kv", "kv_proj", "key_value"), 2),
}
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def _parents(everything: Sequence[Site]) -> dict[int, list[nn.Module]]:
    """The modules around each module, the nearest first."""
    around: dict[int, list[nn.Module]] = {}
    for site in everything:
        nearest = site.owners[0][0] if site.owners else None
        around[id(site.module)] = [] if nearest is None else [nearest, *around[id(nearest)]]
    return around


def _cut(
    ref: WeightRef, parameter: Tensor, parents: Mapping[int, Sequence[nn.Module]], heads: Mapping[str, int]
) -> Blocks | str:
    layout = ref.layout
    matrices, filters, columns = matrix_view(parameter.detach(), layout).shape
    if filters == 1:
        return "depthwise: each filter is a matrix of one row" if matrices > 1 else "a matrix of one row"
    if columns == 1:
        return "a matrix of one column"
    rows = tuple(_rows_of_heads(ref, filters * layout.blocks, parents, heads))
    if layout.blocks > 1 and rows:  # packed q, k and v: a head is a part of one of them
        return Blocks(rows=rows)
    return Blocks(layout.matrices, layout.transposed, rows)


def _rows_of_heads(
    ref: WeightRef, filters: int, parents: Mapping[int, Sequence[nn.Module]], heads: Mapping[str, int]
) -> Iterator[int]:
    """The sizes of consecutive heads in a layer that computes q, k and v at once; none for other layers."""
    asked = next((rows for glob, rows in heads.items() if fnmatchcase(ref.path, glob)), None)
    if asked is not None:
        if filters % asked:
            found = f"{filters} rows of {ref.label} in heads of {asked}"
            raise InvalidArgumentError("param_groups(heads=) takes rows per head", found, "Pass a divisor.")
        yield asked
        return
    packed = isinstance(ref.module, nn.MultiheadAttention) and ref.name == "in_proj_weight"
    names = ref.path.split(".")[-2:]
    parts = 3 if packed else next((_FUSED[name] for name in reversed(names) if name in _FUSED), 0)
    around = [ref.module, *parents[id(ref.module)][:3]]
    if not parts or (not packed and not any(_number(module, _HEADS) for module in around)):
        return
    owner = next(module for module in around if _number(module, _HEADS))
    count = _number(owner, _HEADS)
    key, value = (_number(owner, (name,)) for name in ("key_dim", "val_dim"))
    sizes = ((key, key, value) if parts == 3 else (key, value)) if key and value else ()
    if sizes and filters == count * sum(sizes):  # LeViT: a head's query, key and value differ in size
        yield from sizes
        return
    kv = _number(owner, _KV_HEADS) or count
    total = count + 2 * kv if parts == 3 else 2 * kv
    if filters % total == 0 and filters // total > 1:
        yield filters // total


def _number(module: nn.Module, names: Sequence[str]) -> int:
    """The first of these attributes of a module, or of its configuration, that is a positive number; else 0."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def described(blocks: Blocks, weight: Tensor) -> str:
    """The number and size of the blocks in words.

    Example:
        >>> from gonio.penalty.matrices import Blocks, described
        >>> described(Blocks(rows=(2,)), torch.empty(6, 4))
        '3 matrices 2×4'
    """
    sizes: dict[str, int] = {}
    for part in blocks.split(weight.detach()):
        size = f"{part.shape[1]}×{part.shape[2]}"
        sizes[size] = sizes.get(size, 0) + part.shape[0]
    return ", ".join(f"{n} matrices {size}" if n > 1 else f"matrix {size}" for size, n in sizes.items())
