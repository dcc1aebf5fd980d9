"""Weights of ONNX that operators read as integers: codes, whose scales and zero points are other tensors of the file.

An operator names its scales and zero points among its inputs. Of products of integers (MatMulInteger, ConvInteger) the
scale follows later: the result, as floats, is multiplied by the scale of the activations times that of the weight.

References: onnx/onnx, docs/Operators.md; microsoft/onnxruntime, docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry import Layout
from gonio.measuring.reading.codes import unpacked
from gonio.measuring.reading.entry import TABLE, Axes, StoredTensor

STANDARD = ("", "ai.onnx")
_RUNTIME = "com.microsoft"
# Of (operator, number of the input that holds codes): the numbers of the inputs with scale and zero point, and the axis
# of a vector of them. No scale: it follows the product.
_INPUTS: dict[tuple[str, int], tuple[int | None, int, int]] = {
    ("QLinearConv", 3): (4, 5, 0),
    ("QLinearMatMul", 3): (4, 5, -1),
    ("QLinearMatMul", 0): (1, 2, -2),
    ("QGemm", 3): (4, 5, -1),
    ("DynamicQuantizeMatMul", 1): (2, 3, -1),
    ("MatMulIntegerToFloat", 1): (3, 5, -1),
    ("MatMulInteger", 1): (None, 3, -1),
    ("ConvInteger", 1): (None, 3, 0),
}
OF_RUNTIME = frozenset(
    {"QGemm", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits", "GatherBlockQuantized"}
)
_BITS = {"MatMulNBits": range(2, 9), "GatherBlockQuantized": (2, 4, 8)}
_DEFAULTS = {"quantize_axis": 1, "block_size": 128, "bits": 4}  # of GatherBlockQuantized

Uses = Callable[[str, tuple[int, ...]], Iterator[Axes]]


@dataclass(frozen=True)
class OperatorGraph:
    """The values of a model.

    Attributes:
        stored: the tensors of the file. `users`: for each value (operator, number of the input, prefix of its graph) of
            those that use it. `makers`: the operator that computes a value, and the number of the output.
    """

    stored: dict[str, StoredTensor]
    users: Mapping[str, list[tuple[Any, int, str]]]
    makers: Mapping[str, tuple[Any, int]]

    def held(self, node: Any, number: int | None, prefix: str) -> StoredTensor | None:
        """The tensor of the file that is an input of an operator."""
        name = node.input[number] if number is not None and number < len(node.input) else ""
        return (self.stored.get(f"{prefix}{name}") or self.stored.get(name)) if name else None

    def maker(self, name: str, prefix: str) -> tuple[Any, int] | None:
        return self.makers.get(f"{prefix}{name}") or self.makers.get(name)


@dataclass(frozen=True)
class _Scaled:
    """How codes become values.

    Attributes:
        axis: of a vector of scales, or of blocks of `size` (0 without blocks).
        bits: of codes packed in bytes along the last dimension of `shape`; 0 for codes that are whole numbers.
        blocks: the shape of the scales of packed codes.
        group: of packed codes, the block of each place on the axis, where they are not in order.
    """

    scale: StoredTensor
    zero: StoredTensor | None
    axis: int = 0
    size: int = 0
    bits: int = 0
    shape: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    group: StoredTensor | None = None


def dequantise(graph: OperatorGraph, uses: Uses) -> None:
    """Replace the codes that every operator reads in one way by the values that it computes from them.

    Args:
        uses: of a value and its dimensions, what each operator that uses it says of them.
    """
    used: dict[int, str] = {}
    for name, codes in list(graph.stored.items()):
        users = [user for user in graph.users.get(name, []) if not _is_reshaped_table(graph, *user)]
        made = [_scaled_by(graph, codes, *user) for user in users]
        if not made or made[0] is None or any(one != made[0] for one in made):
            continue
        how = made[0]
        shape = how.shape or codes.shape
        axes = codes.axes or Axes()
        if users[0][0].op_type == "MatMulNBits":
            axes = Axes((0, 1), TABLE, Layout())
        elif len(shape) > 1 and all(_is_dequantizer(node) for node, *_ in users):
            dims = tuple(range(len(shape)))
            told = [one for node, _, prefix in users for one in uses(f"{prefix}{node.output[0]}", dims)]
            axes = told[0] if told and all(one == told[0] for one in told) and told[0].order else axes
        said = f"{how.bits} bits" if how.bits else codes.dtype
        axes = replace(axes, notes=(*axes.notes, f"dequantised from {said} and its scale"))
        load = partial(_values, codes, how)
        used |= {id(part): name for part in (how.scale, how.zero, how.group) if part is not None}
        graph.stored[name] = replace(codes, shape=shape, load=load, values="float32", axes=axes)
    for key, part in list(graph.stored.items()):
        if id(part) in used:
            axes = Axes(reason=f"a part of the quantised {used[id(part)]}", part=True)
            graph.stored[key] = replace(part, axes=axes)


def _is_dequantizer(node: Any) -> bool:
    """Whether a node is DequantizeLinear, of ONNX or of ONNX Runtime, which computes the same."""
    return node.op_type == "DequantizeLinear" and node.domain in (*STANDARD, _RUNTIME) and bool(node.output)


def _scaled_by(graph: OperatorGraph, codes: StoredTensor, node: Any, number: int, prefix: str) -> _Scaled | None:
    """How an operator reads codes; None for another operator, and where scales are not in the file or do not fit."""
    facts = {fact.name: fact.i for fact in node.attribute}
    if _is_dequantizer(node) and number == 0:
        return _fitting(codes, graph, node, prefix, (1, 2, facts.get("axis", 1)), facts.get("block_size", 0))
    if node.domain not in ((_RUNTIME,) if node.op_type in OF_RUNTIME else STANDARD):
        return None
    if (node.op_type, number) == ("MatMulNBits", 1):
        return _packed(graph, codes, node, prefix, facts)
    if (node.op_type, number) == ("GatherBlockQuantized", 0):
        return _table(graph, codes, node, prefix, facts)
    if (node.op_type, number) not in _INPUTS:
        return None
    at, zero, axis = _INPUTS[node.op_type, number]
    axis = 0 if node.op_type == "QGemm" and facts.get("transB") else axis
    scale = _scale_after(graph, node, prefix) if at is None else None
    return _fitting(codes, graph, node, prefix, (at, zero, axis), 0, scale)


def _fitting(
    codes: StoredTensor,
    graph: OperatorGraph,
    node: Any,
    prefix: str,
    where: tuple[int | None, int, int],
    size: int,
    scale: StoredTensor | None = None,
) -> _Scaled | None:
    """Scale, zero point, axis and size of blocks; None where they are no tensors of the file, or do not fit."""
    scale, zero = scale or graph.held(node, where[0], prefix), graph.held(node, where[1], prefix)
    axis, dims, named = where[2], len(codes.shape), len(node.input) > where[1] and node.input[where[1]]
    if scale is None or (named and zero is None):
        return None
    if zero is not None and zero.shape != scale.shape and not (zero.entries == 1 and not size):
        return None
    if scale.entries == 1 and not size:
        return _Scaled(scale, zero) if zero is None or zero.entries == 1 else None
    if not -dims <= axis < dims or size < 0:
        return None
    axis %= dims
    entries = codes.shape[axis]
    fits = scale.shape == (entries,)
    if size:
        fits = scale.shape == (*codes.shape[:axis], -(-entries // size), *codes.shape[axis + 1 :])
    return _Scaled(scale, zero, axis, size) if fits else None


def _scale_after(graph: OperatorGraph, node: Any, prefix: str) -> StoredTensor | None:
    """The scale of the weight in the product that follows a product of integers; None for another graph.

    result → Cast → Mul with (the scale of the activations, by DynamicQuantizeLinear) · (a tensor of the file).
    """

    def only_user(name: str) -> tuple[Any, int, str] | None:
        found = graph.users.get(f"{prefix}{name}", [])
        return found[0] if len(found) == 1 and found[0][0].domain in STANDARD else None

    cast = only_user(node.output[0]) if node.output else None
    product = only_user(cast[0].output[0]) if cast is not None and cast[0].op_type == "Cast" else None
    if product is None or product[0].op_type != "Mul" or len(product[0].input) != 2:
        return None
    both = graph.maker(product[0].input[1 - product[1]], prefix)
    if both is None or both[0].op_type != "Mul" or len(both[0].input) != 2:
        return None
    activations = graph.maker(node.input[0], prefix)
    for own, other in ((0, 1), (1, 0)):
        of_inputs = graph.maker(both[0].input[other], prefix)
        if of_inputs is not None and activations is not None and of_inputs[0] is activations[0] and of_inputs[1] == 1:
            return graph.held(both[0], own, prefix)
    return None


def _is_reshaped_table(graph: OperatorGraph, node: Any, number: int, prefix: str) -> bool:
    """Whether an operator gives codes of another operator to GatherBlockQuantized, in another shape."""
    if node.op_type != "Reshape" or node.domain not in STANDARD or number or not node.output:
        return False
    users = graph.users.get(f"{prefix}{node.output[0]}", [])
    return bool(users) and all((one.domain, one.op_type) == (_RUNTIME, "GatherBlockQuantized") for one, *_ in users)


def _packed(
    graph: OperatorGraph, codes: StoredTensor, node: Any, prefix: str, facts: Mapping[str, int]
) -> _Scaled | None:
    """MatMulNBits: codes (outputs, blocks, bytes of a block), the lowest bits first."""
    columns, rows, size, bits = (facts.get(name, 0) for name in ("K", "N", "block_size", "bits"))
    bits = bits or 4
    scale, zero, group = (graph.held(node, number, prefix) for number in (2, 3, 4))
    named = [number for number in (3, 4) if len(node.input) > number and node.input[number]]
    if scale is None or bits not in _BITS[node.op_type] or min(rows, columns, size) < 1 or size * bits % 8:
        return None
    blocks = -(-columns // size)
    if codes.dtype != "uint8" or codes.entries != rows * blocks * size * bits // 8 or codes.shape[0] != rows:
        return None
    if scale.entries != rows * blocks or (3 in named and zero is None) or facts.get("weight_prepacked"):
        return None
    if 4 in named and (group is None or group.shape != (columns,) or group.dtype != "int32"):
        return None
    if group is not None and zero is not None and zero.dtype == "uint8":
        return None  # onnxruntime 1.31 ignores such zero points on a CPU, and its description does not
    how = _Scaled(scale, zero, 1, size, bits, (rows, columns), (rows, blocks), group)
    return how if _fits_zeros(how) else None


def _table(
    graph: OperatorGraph, codes: StoredTensor, node: Any, prefix: str, facts: Mapping[str, int]
) -> _Scaled | None:
    """GatherBlockQuantized: codes packed along the last dimension, of a type of 4 bits, or 8-bit floats, in blocks."""
    axis, size, bits, dims = (*(facts.get(name, at) for name, at in _DEFAULTS.items()), len(codes.shape))
    scale, zero = graph.held(node, 2, prefix), graph.held(node, 3, prefix)
    floats, single = codes.dtype.startswith("float8"), codes.dtype in ("int4", "uint4")
    if scale is None or not -dims <= axis < dims or size < (not floats) or len(scale.shape) != dims:
        return None
    if (len(node.input) > 3 and node.input[3] and zero is None) or (floats and zero is not None):
        return None
    if not floats and (bits != 4 if single else codes.dtype != "uint8" or bits not in _BITS[node.op_type]):
        return None
    shape = codes.shape if floats or single else (*codes.shape[:-1], codes.shape[-1] * 8 // bits)
    axis, size = axis % dims, size or max(shape[axis], 1)
    blocks = tuple(-(-entries // size) if at == axis else entries for at, entries in enumerate(shape))
    same = [one == n or (floats and n == 1) for one, n in zip(blocks, scale.shape, strict=True)]
    if not all(same) or scale.shape[axis] != blocks[axis]:
        return None
    if single and zero is not None and (zero.dtype, zero.shape) != (codes.dtype, scale.shape):
        return None
    how = _Scaled(scale, zero, axis, size, 0 if floats or single else bits, shape, scale.shape)
    return how if floats or single or _fits_zeros(how) else None


def _fits_zeros(how: _Scaled) -> bool:
    """Whether there are zero points for all blocks, packed as the codes are or one by one."""
    if how.zero is None:
        return True
    *rows, columns = how.blocks
    packed = how.zero.dtype == "uint8"
    return how.zero.entries == prod(rows) * (-(-columns * how.bits // 8) if packed else columns)


def _values(codes: StoredTensor, how: _Scaled) -> Tensor:
    """(code − zero point) · scale, of the tensor, of each place on an axis, or of each block there.

    References: [1] ONNX, docs/Operators.md, DequantizeLinear.
    """
    if how.bits:
        return _packed_values(codes, how)
    numbers = _numbers(codes)

    def spread(part: StoredTensor) -> Tensor:
        held = _numbers(part)
        if part.entries == 1 and not how.size:
            return held.reshape(())
        if how.size:
            entries = codes.shape[how.axis]
            return held.repeat_interleave(min(how.size, entries), how.axis).narrow(how.axis, 0, entries)
        return held.reshape(-1, *[1] * (len(codes.shape) - how.axis - 1))

    shifted = numbers if how.zero is None else numbers - spread(how.zero)
    return (shifted * spread(how.scale)).float()


def _numbers(part: StoredTensor) -> Tensor:
    held = part.load()
    return (held.float() if part.dtype.startswith("float8") else held).double()


def _packed_values(codes: StoredTensor, how: _Scaled) -> Tensor:
    """As above of packed codes; without zero points it is the middle code. Zero points are packed alike."""

    def codes_of(part: StoredTensor, shape: tuple[int, ...]) -> Tensor:
        held = part.load().reshape(prod(shape[:-1]), -1)
        return unpacked(held, how.bits)[:, : shape[-1]].reshape(shape).float()

    scale = how.scale.load().float().reshape(how.blocks)
    if how.zero is None:
        zero = torch.full_like(scale, 2.0 ** (how.bits - 1))
    elif how.zero.dtype == "uint8":
        zero = codes_of(how.zero, how.blocks)
    else:
        zero = how.zero.load().float().reshape(how.blocks)
    numbers = codes_of(codes, how.shape)
    if how.group is not None:
        group = how.group.load().long()
        if int(group.min()) < 0 or int(group.max()) >= how.blocks[1]:
            found = f"{int(group.min())} to {int(group.max())}"
            raise InvalidArgumentError(f"g_idx names one of {how.blocks[1]} blocks", found, "The tensors do not fit.")
        return numbers.sub_(zero[:, group]).mul_(scale[:, group])
    for number in range(how.blocks[how.axis]):  # as many numbers again would be needed to repeat each scale
        begin = number * how.size
        block = numbers.narrow(how.axis, begin, min(how.size, how.shape[how.axis] - begin))
        block.sub_(zero.narrow(how.axis, number, 1)).mul_(scale.narrow(how.axis, number, 1))
    return numbers
