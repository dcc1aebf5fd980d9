"""The products of queries and keys among the functions of torch that a model calls, whatever the modules are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gonio.editing.memory import looks_at_parameters

MASKED = -1e4  # logits below are those of pairs that a mask excludes
CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
LAYERS = frozenset({"linear", "addmm", "mm", "matmul", "__matmul__", "bmm", "baddbmm", *CONVOLUTIONS})
_PRODUCTS = frozenset({"matmul", "__matmul__", "bmm", "baddbmm", "einsum"})
_FIRST = _PRODUCTS | {"scaled_dot_product_attention"}  # all other functions only pass on what these have found
# Functions that multiply, add, mask, or only move entries.
_NAMES = """
    mul __mul__ __rmul__ mul_ __imul__ multiply div __truediv__ div_ __itruediv__ add __add__ __radd__ add_ __iadd__ sub
    __sub__ sub_ masked_fill masked_fill_ where to type type_as float half bfloat16 double clone detach contiguous view
    reshape unsqueeze squeeze transpose permute flatten unflatten expand __get__ __getitem__"""
_AFFINE = frozenset(_NAMES.split())


@dataclass(eq=False)
class Product:
    """A product of two activations, which are queries and keys if a softmax over the keys follows.

    `query` is (…, queries, size), `key` (…, keys, size) and `value` (…, keys, size of a value).
    """

    path: str
    query: Tensor
    key: Tensor
    value: Tensor | None = None
    out: Tensor | None = None
    logits: Tensor | None = None  # the softmax's input, (…, queries, keys)
    scale: float | None = None  # of a kernel without logits; None for its default
    calls: int = 0  # of layers before it was complete
    kernel: bool = False  # a registered module computes it, by no function of torch
    passed: set[str] = field(default_factory=set)  # functions other than affine ones between product and softmax
    mixed: bool = False  # layers are between the softmax and the values
    order: tuple[int, ...] = ()  # of the dimensions of an einsum's result, so that it is (…, queries, keys)
    stack: tuple[str, ...] = ()  # paths of the modules that run when queries and keys are multiplied
    around: str = ""  # the innermost of them that also runs the softmax


class Products(TorchFunctionMode):
    """Recognises attention: two activations are multiplied, a softmax follows, and its result multiplies a third one.

    What lies between, such as masks, scales and biases, is passed over.

    Attributes:
        stack: paths of the modules that are running; the last one calls the function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack = [""]
        self._labels: dict[int, tuple[Tensor, str, Product]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if looks_at_parameters():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.packed(func, args, kwargs)
        out = func(*args, **kwargs)
        return self.seen(getattr(func, "__name__", ""), args, kwargs, out)

    def packed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """torch's attention in one function."""
        return func(*args, **kwargs)

    def seen(self, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        """Act on the result of a function; returns what the model gets."""
        if not self._labels and name not in _FIRST:
            return out
        operands = tensors_of(args, kwargs)
        if name == "softmax" and isinstance(out, Tensor):
            self._softmax(operands[0], args, kwargs, out)
        elif name == "scaled_dot_product_attention":
            query, key, value = operands[:3]
            scale = kwargs.get("scale", args[6] if len(args) > 6 else None)
            path = self.stack[-1]
            self.found(Product(path, query, key, value, out, scale=scale, around=path), args, kwargs)
        elif name in _PRODUCTS and isinstance(out, Tensor):
            self._product(name, operands, args, out)
        else:
            self.label(operands, out, name)
        return out

    def found(self, product: Product, args: Any, kwargs: Any) -> None:
        """Act on a product that is one of queries and keys, with the arguments of the softmax or of the attention."""

    def valued(self, product: Product) -> None:
        """Act on a product whose shares have multiplied values."""

    def label(self, sources: Sequence[Tensor], out: Any, name: str) -> Any:
        """Pass on the label of an argument: masks, scales and biases leave logits what they are."""
        label = next((self._labels[id(t)] for t in sources if id(t) in self._labels), None)
        if label is None:
            return out
        results = out if isinstance(out, (tuple, list)) else (out,)
        made = [t for t in results if isinstance(t, Tensor) and t.is_floating_point()]
        if made:  # a question, such as that for a shape, changes nothing
            others = [t for t in sources if id(t) not in self._labels]
            if label[1] == "logits" and (name not in _AFFINE or any(t.requires_grad for t in others)):
                label[2].passed.add(name)  # also the sum with a trained bias, which may be 0 now
            label[2].mixed |= label[1] == "shares" and name in LAYERS and label[2].value is None
            self._labels.update({id(tensor): (tensor, *label[1:]) for tensor in made})
        return out

    def _product(self, name: str, operands: list[Tensor], args: Any, out: Tensor) -> None:
        """Queries times keys, or shares times values: (…, i, c) and (…, j, c) with a sum over c."""
        pair = operands[1:3] if name == "baddbmm" else operands[:2]
        if len(pair) != 2 or min(t.ndim for t in pair) < 2:
            return
        labels = [self._labels.get(id(t)) for t in pair]
        left, right, order = (pair[0], pair[1].mT, ()) if name != "einsum" else _spelled(args[0], *pair)
        if left.ndim < 2:  # of shares, whose values stay unknown
            return
        for label, shares, other in ((labels[0], left, right), (labels[1], right, left)):
            if label is not None and label[1] == "shares" and label[2].value is None:
                if _of_queries(shares):
                    continue
                label[2].value, label[2].out = other.mT, out
                self.valued(label[2])
                return
        if all(label is None or label[1] == "logits" for label in labels):  # of blocks before
            made = Product(self.stack[-1], left, right, order=order, stack=tuple(self.stack))
            self._labels[id(out)] = (out, "logits", made)

    def _softmax(self, x: Tensor, args: Any, kwargs: Any, out: Tensor) -> None:
        label = self._labels.get(id(x))
        dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else None)
        if label is None or label[1] != "logits" or dim is None:
            return
        product = label[2]
        order = product.order if len(product.order) == x.ndim else tuple(range(x.ndim))
        place = order.index(dim % x.ndim) - x.ndim
        if place < -2:
            return
        product.around = next((path for path in reversed(product.stack) if path in self.stack), "")
        product.logits = x if product.order == () else x.permute(order)
        if place == -2:
            product.query, product.key, product.logits = product.key, product.query, product.logits.mT
        self._labels[id(out)] = (out, "shares", product)
        self.found(product, args, kwargs)


def _of_queries(shares: Tensor) -> bool:
    """Whether the shares (…, i, keys) that are summed with values add up to 1 over queries, and not over keys."""
    if shares.ndim < 2 or not shares.numel():
        return False
    over_keys, over_queries = (bool((shares.detach().sum(dim) - 1).abs().max() < 1e-3) for dim in (-1, -2))
    return over_queries and not over_keys


def floats_in(result: Any) -> list[Tensor]:
    """The floating-point tensors in any nesting of tuples, lists and dicts, in their order."""
    return [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]


def returned(outputs: Any) -> list[Tensor]:
    """The tensors that a model returns itself or in one tuple, list or dict, in their order."""
    direct = [*outputs.values()] if isinstance(outputs, Mapping) else outputs
    return [x for x in (direct if isinstance(direct, (tuple, list)) else (direct,)) if isinstance(x, Tensor)]


def tensors_of(args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a function, also in lists, in their order."""
    found = []
    for value in (*args, *kwargs.values()):
        items = value if isinstance(value, (tuple, list)) else (value,)
        found += [item for item in items if isinstance(item, Tensor)]
    return found


def _spelled(equation: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The operands of an einsum as (…, i, c) and (…, j, c), and the order that brings its result to (…, i, j).

    Empty ones where it is no product of two matrices.
    """
    nothing = torch.empty(0, device="cpu", dtype=torch.float32), torch.empty(0, device="cpu", dtype=torch.float32), ()
    if not isinstance(equation, str) or "->" not in equation:
        return nothing
    inputs, out = equation.replace(" ", "").replace("...", ".").split("->")
    letters = inputs.split(",")
    if len(letters) != 2 or any(len({*each}) < len(each) for each in letters):  # of three, or a diagonal
        return nothing
    whole = {t.ndim - len(each) + 1 for t, each in zip((a, b), letters, strict=True) if "." in each}
    if len(whole) > 1 or ("." in inputs) != ("." in out):  # dimensions that one lacks, or that are summed
        return nothing
    dots = "".join([x for x in ascii_letters if x not in equation][: max(whole, default=0)])
    letters, out = [each.replace(".", dots) for each in letters], out.replace(".", dots)
    both = [x for x in letters[0] if x in letters[1]]
    summed = [x for x in both if x not in out]
    shared = [x for x in out if x in both]
    own = [[x for x in each if x not in both] for each in letters]
    if len(summed) != 1 or any(len(each) != 1 or each[0] not in out for each in own):
        return nothing
    left, right = (t.permute(*[each.index(x) for x in (*shared, *mine, *summed)])
                   for t, each, mine in zip((a, b), letters, own, strict=True))  # fmt: skip
    return left, right, tuple(out.index(x) for x in (*shared, *own[0], *own[1]))
