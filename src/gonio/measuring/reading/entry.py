"""A tensor before it is measured: its name, its layout, and a function that reads its values.

Without its model, a tensor's layout follows from its key, its shape and the tensors beside it. A key says what torch's
layers call their weights; it is held against the shapes of the bias and of the other tensors of the same layer. What
these do not settle is assumed with a note, or left unread with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from typing import Any, Literal

import torch
from torch import Tensor

from gonio.errors import first_line
from gonio.escaping import plain
from gonio.geometry import Layout
from gonio.geometry.views import ATTENTION
from gonio.messages import Message, are, counted, fixed, say

Mark = Literal["table", "padding", "maybe padding", "filled", "fixed", "constant", "ordered", "no variance", "failed"]
"""What rules ask of a tensor beside its figures; :data:`NOTES` say it to the reader."""
NOTES: Mapping[Mark, str] = {
    "padding": "one row is padding and stays 0",  # an embedding with padding_idx
    "maybe padding": "its one row of zeros is the padding of an embedding, or a dead filter",
    "filled": "its last rows are 0, as those that fill a vocabulary up",
    # rows of tables that were not learned: fixed positions, and gains that all start from one value
    "fixed": "a table that is not trained, in a model that is",
    "constant": "every row is the same: it starts from a constant",
    "ordered": "neighbouring rows are alike, as those of positions are",
    "no variance": fixed("every running variance is 0"),
}

FEW_DIMENSIONS = (say("a single number"), say("a vector"))  # why a tensor of so many dimensions has no filters
USUAL_PADDING = (0, 1)  # the first row, as in BERT and T5, or the second one, as in RoBERTa, BART and MPNet
ADDITIVE_MASK = "an additive mask: every value is 0 or −inf"
EIGHT_BITS = "8-bit floats, read as float32"
# The kinds of tensors of adapters, whose rows lie in a few directions by construction.
LOW_RANK, FACTOR = fixed("low-rank product"), fixed("factor of an adapter")


def fills_up(count: int, total: int, first: Sequence[int]) -> bool:
    """Whether the rows of zeros are the last ones, as those that fill a vocabulary up to a round number.

    Args:
        count: of rows of zeros among `total`. `first`: the first ones of them.
    """
    return 0 < count < total and first[0] == total - count


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to measure.

    Attributes:
        name: its key in the state dict, without the names that wrappers add.
        kind: the layer's class, or what the shape suggests.
        layout: how it is stored; None for a tensor without filters.
        load: reads the tensor; called once. The tensor is released before the next one is read.
        reason: why it has no filters, or why it cannot be measured at all.
        notes: remarks for the reader, for example that the layout was inferred from the shape.
        marks: what of them rules ask for.
        tied: the name of the entry that holds the same tensor.
        shape, dtype: as far as they are known without reading the tensor; None and "" for a computed weight.
        role: "part" of a weight that is computed from several tensors, or of an "adapter": neither is a weight of the
            plain model. "unknown" for a weight whose values are not known: `load` gives NaN, `reason` says why.
        fault: whether an adapter, or the choice of its base, is at fault for this.
        weight_name: of a computed weight, its name in the plain model, if `name` is another one.
        inferred: whether the layout follows from name and shape alone, so that the values are held against it.
        padding: of a matrix in a file that may be an embedding, the rows of which one is 0 if it has a padding row.
        table: whether it is an embedding, or may be one, as a matrix of a file without a bias and without siblings.
    """

    name: str
    kind: str
    layout: Layout | None
    load: Callable[[], Tensor] | None
    reason: str = ""
    notes: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    role: Literal["", "part", "adapter", "unknown"] = ""
    fault: bool = False
    weight_name: str = ""
    inferred: bool = False
    padding: tuple[int, ...] = ()
    table: bool = False
    marks: tuple[Mark, ...] = ()
    tied: str = ""

    @classmethod
    def unread(cls, name: str, reason: str, shape: tuple[int, ...] | None = None, dtype: str = "") -> TensorEntry:
        """A tensor that cannot be measured at all."""
        return cls(name, "", None, None, reason, shape=shape, dtype=dtype)

    def marked(self, mark: Mark) -> TensorEntry:
        """The same entry with a mark, and with the note that says it."""
        if mark in self.marks:
            return self
        return replace(self, marks=(*self.marks, mark), notes=(*self.notes, NOTES[mark]))

    @property
    def path(self) -> str:
        """See :func:`layer_path`."""
        return layer_path(self.name)

    def read(self) -> Tensor | None:
        """The tensor; None for one that cannot be measured at all."""
        return None if self.load is None else self.load()

    def unknown(self, reason: str) -> TensorEntry:
        """The same tensor with values that are not known."""
        shape = self.shape or ()
        return replace(
            self,
            load=lambda: torch.full(shape, torch.nan, device="cpu", dtype=torch.float32),
            reason=reason,
            role="unknown",
            notes=(),
            marks=(),
        )


def layer_path(name: str) -> str:
    """The layer's path for its weight, the full name for any other tensor."""
    return name.removesuffix(".weight")


def with_ties(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The entries, tied ones with the values of the tensor that they are tied to."""
    made = list(entries)
    named = {entry.name: entry for entry in made}
    return [
        replace(named[e.tied], name=e.name, weight_name=e.weight_name, role=e.role, tied=e.tied) if e.tied else e
        for e in made
    ]


def says_tied(name: str) -> str:
    return f"tied to {name}, where it is measured"


@dataclass(frozen=True)
class Axes:
    """What a format itself, or else key and shape, say about the dimensions of a tensor.

    Attributes:
        order: the stored dimensions in torch's order (outputs, inputs, positions); None if the format does not tell it.
        kind: what the tensor is. `layout`: how it is read in torch's order.
        reason: why it has no filters, or why the order is not known. `notes`: remarks for the reader.
        part: whether it is a part of a weight that is computed from several tensors.
    """

    order: tuple[int, ...] | None = None
    kind: str = ""
    layout: Layout | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    part: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file or state dict: its header, and a function that reads its values.

    Attributes:
        dtype: torch's name for it, without `torch.`; the file's own name for one that torch does not have.
        values: the dtype in which `load` gives the values, where it is not `dtype` itself.
        file: the name of the file that holds it, where a reader knows it.
        axes: what the format says about its dimensions; None if it stores torch's own tensors.
        described: what the file's header says of the tensor subclass that it is a part of; empty without one.
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Tensor]
    values: str = ""
    file: str = ""
    axes: Axes | None = None
    described: Mapping[str, Any] = field(default_factory=dict)

    @property
    def entries(self) -> int:
        return prod(self.shape)

    @property
    def floating(self) -> bool:
        """Whether its values are floating-point numbers of a dtype of torch."""
        dtype = dtype_named(self.values or self.dtype)
        return dtype is not None and dtype.is_floating_point

    @classmethod
    def of(cls, tensor: Tensor, load: Callable[[], Tensor] | None = None) -> StoredTensor:
        """A tensor in memory, or one that `load` reads again."""
        return cls(*header_of(tensor), load or (lambda: tensor))

    @classmethod
    def unread(cls, shape: Sequence[int], dtype: str) -> StoredTensor:
        """One of which only the header is known; its values read as 0."""
        return cls(tuple(shape), dtype, partial(torch.zeros, tuple(shape), device="cpu", dtype=torch.float32))

    def entry(
        self, name: str, kind: str, layout: Layout | None, reason: str = "", notes: tuple[str, ...] = ()
    ) -> TensorEntry:
        return TensorEntry(name, kind, layout, self.load, reason, notes, self.shape, self.dtype)


def wrong_size(held: int, entries: int, size: int) -> Message:
    """Why the bytes that are stored are not the values of a tensor."""
    told = {"held": held, "entries": entries, "size": size}
    return say("{held} bytes are stored for {entries} entries, which take {size}", **told)


def no_dtype(name: str) -> str:
    """Why a tensor of a dtype of this name is not read."""
    return f"torch has no dtype for {plain(name, longest=40)}"


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of this name; None if torch has none."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def header_of(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    """Shape and dtype; `((), "")` for a tensor subclass that raises when they are read."""
    try:
        return tuple(int(n) for n in tensor.shape), dtype_name(tensor.dtype)
    except Exception:  # subclasses run code of their own here
        return (), ""


def stored_entries(tensor: Tensor) -> int:
    """The entries in a strided tensor's storage; fewer than `numel()` for an expanded one."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def is_blown_up(tensor: Tensor) -> bool:
    """Whether a strided tensor repeats what it stores so often that it is not read: a kilobyte can claim terabytes."""
    return tensor.numel() > max(LARGEST_EXPANDED, stored_entries(tensor))


LONG = 32  # inputs, and positions of a kernel, above which a tensor of three dimensions is rather a stack of matrices
LARGEST_EXPANDED = 1 << 24  # entries up to which a tensor may repeat those that it stores
PACKED = {torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.uint32}
INTEGERS = {*PACKED, torch.int64, torch.uint64}


@dataclass(frozen=True)
class Numbers:
    """A tensor's values as an ordinary dense floating-point tensor, or the reason why there are none.

    Attributes:
        skipped: whether the tensor is a weight that should have been measured; False for a counter, for example.
    """

    tensor: Tensor | None
    reason: str = ""
    skipped: bool = True
    notes: tuple[str, ...] = ()


def numbers_of(tensor: Tensor) -> Numbers:
    """The measurable values of any kind of tensor; never raises because of the kind."""
    notes: tuple[str, ...] = ()
    if hasattr(tensor, "full_tensor"):  # a DTensor: a local shard's norms are not the layer's
        tensor, notes = tensor.full_tensor(), ("gathered from all ranks",)
    if tensor.is_meta:
        return Numbers(None, "on the meta device: it has a shape and no values")
    if tensor.is_quantized or type(tensor).dequantize is not Tensor.dequantize:
        return _dequantized(tensor)
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else f"sparse ({dtype_name(tensor.layout)})"
        return Numbers(None, f"{kind}: filters are not stored whole")
    if not tensor.is_floating_point():
        return _no_floats(tensor)
    if is_blown_up(tensor):
        return Numbers(None, f"expanded: {tensor.numel():,} entries, of which {stored_entries(tensor):,} are stored")
    if not tensor.numel():
        return Numbers(None, f"empty: shape {tuple(tensor.shape)}", skipped=False)
    if tensor.element_size() == 1:  # torch has few operations for such floats, and none for those of 4 bits
        try:
            tensor.detach().flatten()[:1].float()
        except RuntimeError:
            return Numbers(None, f"packed as {dtype_name(tensor.dtype)}")
        notes = (*notes, EIGHT_BITS)
    return Numbers(tensor.detach(), notes=notes)


def _dequantized(tensor: Tensor) -> Numbers:
    try:
        plain = tensor.dequantize()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        said = first_line(error, 100)
        return Numbers(None, f"quantised ({type(tensor).__name__}), and cannot be dequantised here: {said}")
    kind = type(tensor).__name__  # whose dtype is that of its values
    if tensor.is_quantized:
        kind = dtype_name(tensor.dtype)
    return Numbers(plain.detach(), notes=(f"dequantised from {kind}",))


def _no_floats(tensor: Tensor) -> Numbers:
    kind = dtype_name(tensor.dtype)
    if tensor.is_complex():
        return Numbers(None, "complex: angles between complex filters are not defined here")
    if tensor.dtype in PACKED and tensor.ndim >= 2:
        return Numbers(None, f"{kind}: packed or quantised weights, whose scale is not known here")
    if tensor.dtype == torch.bool or tensor.dtype in INTEGERS:
        return Numbers(None, "a counter" if tensor.ndim == 0 else f"{kind}, not weights", skipped=False)
    return Numbers(None, f"packed as {kind}")


def dtype_name(value: torch.dtype | torch.layout) -> str:
    """torch's name of a dtype or layout, without `torch.`."""
    return str(value).removeprefix("torch.")


# --- layouts from keys and shapes ------------------------------------------------------------------------------------

Shapes = Mapping[str, tuple[int, ...]]

WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
_RECURRENT = re.compile(r"(.*?)weight_(ih|hh|hr)(_l\d+(?:_reverse)?)?")
TABLE = "linear or embedding"  # a matrix of a file that may be a table
EMBEDDING = "embedding"  # one of which the format tells that it is a table
MATRIX = "matrix"  # one of which nothing tells which dimension holds the outputs
AS_STORED = fixed("rows read as filters, as they are stored: which dimension holds the outputs is not known")
LINEAR = "linear"  # one with a bias, or with siblings in other layers
_KINDS = {2: TABLE, 3: "1-d convolution", 4: "2-d convolution", 5: "3-d convolution"}
_RAW = "a part of a parametrization that is not read"
UNKNOWN = "not called a weight, so not read as filters"
STACKED = "a stack of matrices"
INPUTS_FIRST = "stored with its inputs first, as the bias tells"
_BEGINNING = 1024  # entries of a row that are looked at first
SMALL_KERNEL = 8  # positions of a convolution in a dimension, less than it has channels


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Each key without the names that wrappers add; `module.` is removed only if every key begins with it.

    Example:
        >>> from gonio.measuring.reading.entry import clean_names
        >>> clean_names(["module._orig_mod.fc.weight", "module.module.w"])
        {'module._orig_mod.fc.weight': 'fc.weight', 'module.module.w': 'module.w'}
    """
    cleaned = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names}
    names = list(cleaned)
    if names and all(name.startswith("module.") for name in cleaned.values()):
        cleaned = {name: kept.removeprefix("module.") for name, kept in cleaned.items()}
    unique = len(set(cleaned.values())) == len(cleaned)
    return cleaned if unique else {name: name for name in names}


def stores_inputs_first(shapes: Shapes) -> bool:
    """Whether all matrices of a file whose bias tells have their inputs first (`Conv1D` of GPT-2 and its kin)."""
    found = set()
    for name, shape in shapes.items():
        bias = _bias_of(name, shapes)
        if len(shape) == 2 and bias is not None and len(bias) == 1 and shape[0] != shape[1] and bias[0] in shape:
            found.add(bias[0] == shape[1])
    return found == {True}


def has_bias(name: str, shapes: Shapes) -> bool:
    """Whether the file has a bias for this weight."""
    return _bias_of(name, shapes) is not None


def _bias_of(name: str, shapes: Shapes) -> tuple[int, ...] | None:
    """The shape of the bias beside a weight; None without one."""
    path, _, last = name.rpartition("weight")
    return shapes.get(f"{path}bias{last}") if name.rpartition(".")[2].count("weight") == 1 else None


def holds_variances(name: str) -> bool:
    """Whether a tensor of a file holds the running variances of a norm: torch calls them so in every norm."""
    return name.rpartition(".")[2] == "running_var"


_MASKED = 16  # one value in so many is −inf, at least


def is_mask(shape: Sequence[int], nonfinite: int, minus: int) -> bool:
    """Whether infinite values are those of an additive mask of attention, if the others are 0.

    Args:
        nonfinite, minus: number of values that are NaN or infinite, and of those that are −inf.
    """
    return len(shape) > 1 and minus == nonfinite > 1 and _MASKED * minus >= prod(shape)


def is_additive_mask(tensor: Tensor, nonfinite: int) -> bool:
    """Whether a tensor with so many infinite values is an additive mask: the others are 0."""
    if tensor.is_complex() or not is_mask(tensor.shape, nonfinite, int((tensor == -inf).sum())):
        return False
    return not bool(torch.where(tensor == -inf, 0, tensor).any())


def negative_variances(count: int) -> Message:
    """What is said of running variances below 0."""
    return say("{variances} {are} negative", variances=counted(count, "running variance"), are=are(count))


def infer(name: str, shapes: Shapes, *, inputs_first: bool = False) -> Axes:
    """What key and shape of a tensor say of it, in the order in which it is stored.

    A weight of two to five dimensions is a stack of filters on dim 0: a linear layer or an embedding (2), a
    convolution (3 to 5). Groups and transposition of a convolution cannot be seen; it is read as neither.

    Args:
        shapes: of all tensors of the state dict.
        inputs_first: whether matrices of the file that are square, and have a bias, have their inputs first too.
    """
    shape = shapes[name]
    last, unread = name.rpartition(".")[2], f"{len(shape)}-d tensor"
    if len(shape) < 2:
        return Axes(kind=unread, reason=FEW_DIMENSIONS[len(shape)])
    if ".parametrizations." in f".{name}" and last == "original":
        return Axes(kind="parametrization", reason=_RAW)
    bias = _bias_of(name, shapes)
    recurrent = _RECURRENT.fullmatch(name)
    named = last in ("weight", "lora_A", "lora_B", *ATTENTION) or recurrent is not None
    told = bias is not None and len(bias) == 1 and bias[0] in (shape[0], shape[1])
    if len(shape) not in _KINDS or not (named or told):
        return Axes(kind=unread, reason=UNKNOWN)
    kind = _KINDS[len(shape)]
    if bias is not None and bias == shape:
        return Axes(kind=unread, reason="gains: its bias has the same shape")
    if len(shape) == 2 and told and bias is not None and recurrent is None and last not in ATTENTION:
        square = shape[0] == shape[1]
        if (not square and bias[0] == shape[1]) or (square and inputs_first):
            said = INPUTS_FIRST if not square else f"{INPUTS_FIRST}es"
            return Axes(kind=kind, layout=Layout(transposed=True), notes=(said,))
    if len(shape) > 2 and told and bias is not None and bias[0] != shape[0]:
        said = "outputs on dim 1, as its bias tells"
        return Axes(kind=f"transposed {kind}", layout=Layout(transposed=True), notes=(said,))
    if len(shape) == 3 and (bias == shape[:2] or bias == shape[::2]):
        return Axes(kind=unread, reason=f"{STACKED}: its bias has a row for each")
    if len(shape) == 3 and not told and min(shape[1:]) > LONG:
        return Axes(kind=unread, reason=f"{STACKED}, or kernels of {shape[2]} positions: no bias tells")
    blocks, notes = _blocks(name, shapes)
    if len(shape) > 2:
        lone = shape[1] == 1 and shape[0] > 1
        notes = (*notes, "depthwise, or of one input channel" if lone else "groups unknown, read as 1")
    return Axes(kind=kind, layout=Layout(blocks=blocks), notes=notes)


def _blocks(name: str, shapes: Shapes) -> tuple[int, tuple[str, ...]]:
    """The number of stacked matrices in packed attention and recurrent weights, and a note."""
    shape = shapes[name]
    if name.endswith("in_proj_weight") and shape[0] == 3 * shape[1]:
        return 3, ("packed attention: three matrices",)
    if (found := _RECURRENT.fullmatch(name)) and found[2] != "hr":
        path, layer = found[1], found[3] or ""
        projected = shapes.get(f"{path}weight_hr{layer}", ())  # (outputs, hidden) where an LSTM projects its output
        hidden = (projected or shapes.get(f"{path}weight_hh{layer}", (0,)))[-1]
        blocks = shape[0] // hidden if hidden and shape[0] % hidden == 0 else 1
        if blocks in (3, 4):
            return blocks, (f"{'LSTM' if blocks == 4 else 'GRU'}: {blocks} matrices",)
    return 1, ()


def is_batched_kernel(shape: tuple[int, ...]) -> bool:
    """Whether a shape is (1, outputs, inputs, k, k) of a modulated convolution, and none of a 3-d convolution."""
    return len(shape) == 5 and shape[0] == 1 and shape[3] == shape[4] <= SMALL_KERNEL < shape[2]


def why_no_filters(tensor: Tensor, *, lone: bool) -> str:
    """Why the values of a tensor are no filters, where name and shape alone say that they are; empty if they may be.

    Gains of a norm over several dimensions begin at 1 and stay near it, entry by entry. A fixed kernel (blur) repeats
    one row of positive values in every channel. Neither can be a layer's random or trained filters.

    Args:
        lone: whether each filter has one input channel.
    """
    first = tensor.reshape(len(tensor), -1)[:2, :_BEGINNING].float()  # most tensors are told by a few entries
    if bool(_near_one(first[None])):
        values = tensor.float()
        if bool(((values > 0.5) & (values < 2)).all()):
            return "every value is within a factor of two of 1: gains, not filters"
    alike = lone and tensor.ndim > 2 and bool((first >= 0).all()) and torch.equal(first[0], first[-1])
    if alike and bool((tensor[:1] >= 0).all()) and bool(tensor[:1].any()) and bool((tensor == tensor[:1]).all()):
        return "the same kernel in every channel: fixed, not trained"
    return ""


def are_sinusoids(table: Tensor) -> bool:
    """Whether a matrix holds the sines and cosines of positions: pairs of entries whose squares add up to 1.

    References: [1] A. Vaswani et al., "Attention is all you need", 2017, section 3.5. arXiv 1706.03762
    """
    rows, columns = table.shape
    if not bool(_zeros_and_ones(table[None, 0, :_BEGINNING].float())):  # most tables are told by a few entries
        return False

    def fits(part: Tensor) -> bool:
        squares = part.float().square()
        whole = (squares.sum(1) - columns / 2).abs().max() < 1e-3 * columns
        return bool(whole) and float(squares.max()) <= 1 + 1e-2

    if columns % 2 or columns < 4 or rows < 2 or not fits(table[:2]) or not fits(table):
        return False
    return bool(_zeros_and_ones(table[None, 0].float()))  # position 0


def may_be_fixed(stack: Tensor) -> Tensor:
    """Whether each of some tensors of one shape may be one of :func:`why_no_filters` or :func:`are_sinusoids`."""
    first = stack.flatten(2)[:, :2, :_BEGINNING].float()
    return _near_one(first) | _zeros_and_ones(first[:, 0]) | (first >= 0).flatten(1).all(1)


def _near_one(first: Tensor) -> Tensor:
    return ((first > 0.5) & (first < 2)).flatten(1).all(1)


def _zeros_and_ones(row: Tensor) -> Tensor:
    squares = row.square()
    return ((squares < 1e-4) | ((squares - 1).abs() < 1e-2)).all(1)
