"""One run of a model in which the calls of its layers, and the products of queries, keys and values, are recorded.

The result of each layer with a weight is detached, so that the autograd graph of a tensor ends at the layers from which
it is computed directly, and norms pass gradients entry by entry. The derivative of a query then names the rows of the
weight that compute it, whatever the modules are called. What the model computes is not changed.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from gonio.editing.memory import refuse_inference, storage_of
from gonio.editing.twin import evaluating, twin_of
from gonio.editing.where import sites
from gonio.execution import as_usual_saved
from gonio.messages import say
from gonio.seeding import generator, normal
from gonio.surgery import facts
from gonio.surgery.equivalent import call, fitting
from gonio.surgery.products import CONVOLUTIONS, LAYERS, Product, Products, tensors_of

_RECTIFIERS = frozenset({"relu", "relu_", "relu6", "hardtanh", "hardtanh_", "hardswish", "hardswish_"})
_TINY = 1e-30  # slope of a rectifier where it has none: with it, a channel that is 0 in the run is seen
_LAST: dict[str, Literal["rms", "layer"]] = {"rms_norm": "rms", "layer_norm": "layer"}  # over the last dimensions
_FUNCTIONAL_NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "batch_norm", "normalize"})


@dataclass(frozen=True)
class Part:
    """Rows of a weight (of columns, where `dim` is 1), as half-open ranges in their order.

    The entries of `bias` that belong to them are `bias_start` further on.

    Example:
        >>> from gonio.surgery import Part
        >>> Part("qkv.weight", ((0, 4), (8, 12))).count, str(Part("qkv.weight", ((0, 4), (8, 12))))
        (8, 'qkv.weight[0:4, 8:12]')
    """

    tensor: str
    rows: tuple[tuple[int, int], ...]
    dim: int = 0
    bias: str = ""
    bias_start: int = 0

    @classmethod
    def of(cls, tensor: str, indices: Sequence[int], dim: int = 0, bias: str = "", bias_start: int = 0) -> Part:
        """The part of these indices."""
        ranges: list[tuple[int, int]] = []
        for index in sorted(indices):
            if ranges and ranges[-1][1] == index:
                ranges[-1] = (ranges[-1][0], index + 1)
            else:
                ranges.append((index, index + 1))
        return cls(tensor, tuple(ranges), dim, bias, bias_start)

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(stop - start for start, stop in self.rows)

    @property
    def indices(self) -> list[int]:
        """The numbers of the rows."""
        return [index for start, stop in self.rows for index in range(start, stop)]

    def __str__(self) -> str:
        places = ", ".join(f"{start}:{stop}" for start, stop in self.rows)
        return f"{self.tensor}[{':, ' * self.dim}{places}]"


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer with a weight.

    Attributes:
        tensor: the weight's name; its entries from `start` on, along `out_dim`, are channels of the output.
        in_dim: the dimension of the weight that counts the inputs.
        index: the expert, of a stacked weight; None for others.
        x: the input, with its graph; out: the output, at which graphs end.
        channel: the dimension of `out` (and of `x`) that counts the outputs (and the inputs).
        pointwise: whether each position is computed from the same position alone.
        plain: whether the bias is none or a parameter, so that a factor of rows and bias is one of the output.
        bias_start: the number of the entry of the bias that belongs to row 0.
    """

    path: str
    tensor: str
    bias: str
    out_dim: int
    in_dim: int
    start: int
    index: int | None
    x: Tensor
    out: Tensor
    channel: int
    pointwise: bool = True
    plain: bool = True
    bias_start: int = 0

    def part(self, channels: Sequence[int]) -> Part:
        """The rows of the weight that compute these channels of the output."""
        return Part.of(self.tensor, [self.start + c for c in channels], self.out_dim, self.bias, self.bias_start)


@dataclass(frozen=True, eq=False)
class Normed:
    """One call of a norm: the path of its module, the names of its gains, its input, and its result with its graph.

    `over` are the modules whose calls ended before. Of a function of torch, `kind` says which one, and `shift` is the
    name of what it adds; its path is that of the module that calls it.
    """

    path: str
    gains: tuple[str, ...]
    x: Tensor
    out: Tensor
    over: frozenset[str]
    kind: Literal["", "rms", "layer"] = ""
    shift: str = ""


@dataclass
class Recording:
    """What was recorded, in the order of execution.

    Attributes:
        norms: the gains of norms.
        parameters: those of the model under all of their names, without those of wrappers.
        normed: results of norms.
        gained: calls of the modules that are norms.
        functional: calls of torch's functions that are norms of the last dimension.
        used: parameters that any function took.
        began: by the path of a module, how many of its calls began.
        tables: parameters that are looked up, with the results.
        chosen: the scores of which the largest were chosen, for example by a router.
    """

    calls: list[Call] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    norms: dict[str, None] = field(default_factory=dict)  # in order
    normed: list[Tensor] = field(default_factory=list)
    gained: list[Normed] = field(default_factory=list)
    functional: list[Normed] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    began: Counter[str] = field(default_factory=Counter)
    tables: list[tuple[str, Tensor]] = field(default_factory=list)
    chosen: list[tuple[str, Tensor]] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)  # by path, why attention there was not recorded
    outputs: Any = None


class Recorder(Products):
    """Records the functions of torch that a model calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.run = Recording(parameters=dict(model.named_parameters(remove_duplicate=False)))
        self._names = {id(p): name for name, p in model.named_parameters()}
        dense = [(n, p) for n, p in model.named_parameters() if not is_lazy(p) and p.layout is torch.strided]
        stored = ((storage_of(p), (name, p)) for name, p in dense if p.numel())
        self._stored: dict[int | None, tuple[str, Tensor]] = {
            storage: each for storage, each in stored if storage is not None
        }
        self._known: dict[Any, bool] = {}  # whether modules of a kind and shape are norms
        self._paused = False

    # one module

    def enter(self, path: str, *_: Any) -> None:
        """The hook before a forward."""
        self.stack.append(path)
        self.run.began[path] += 1

    def leave(self, *_: Any) -> None:
        """The hook after it."""
        self.stack.pop()

    # one function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Activation checkpointing would not save what derivatives take, and run the model again, unobserved.
        with as_usual_saved():
            return self._called(func, types, args, kwargs)

    def _called(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        rectified = getattr(func, "__name__", "") in _RECTIFIERS and not self._paused and tensors_of(args, kwargs or {})
        if not rectified or not rectified[0].requires_grad:
            return super().__torch_function__(func, types, args, kwargs)
        before = rectified[0].clone().nan_to_num(0.0, 0.0, 0.0)  # the function may act in place, and ∞ − ∞ is no 0
        out = super().__torch_function__(func, types, args, kwargs)
        return self.label([out], out + _TINY * (before - before.detach()), func.__name__)

    def seen(self, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        """Record the call of a layer, of a norm or of a table, or what belongs to attention."""
        if self._paused:
            return out
        operands = tensors_of(args, kwargs)
        if name != "__get__" or isinstance(out, Tensor):  # what asks for a shape or a device uses no value
            self._uses(operands)
        if name == "topk":
            self.run.chosen.append((self.stack[-1], operands[0]))
        elif isinstance(out, Tensor) and name == "embedding":
            return self._table(operands, out)
        elif isinstance(out, Tensor) and name in _FUNCTIONAL_NORMS:
            return self._functional(name, args, kwargs, operands[0], out)
        elif isinstance(out, Tensor) and name in LAYERS:
            made = self._layer(name, operands, out)
            if made is not None:
                return self.label(operands, made, name)
        return super().seen(name, args, kwargs, out)

    def found(self, product: Product, args: Any, kwargs: Any) -> None:
        """Record queries and keys."""
        product.calls = len(self.run.calls)
        self.run.products.append(product)

    def valued(self, product: Product) -> None:
        """Layers of values may be called after the softmax."""
        product.calls = len(self.run.calls)

    def _uses(self, operands: list[Tensor]) -> None:
        self.run.used.update(self._names[id(t)] for t in operands if id(t) in self._names)

    # layers

    def _located(self, tensor: Any) -> tuple[str, int, int | None, bool] | None:
        """Of a parameter or a view of one: its name, the first row, the expert, and whether it is transposed."""
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return None
        if tensor.ndim < 2 or not tensor.numel():
            return None
        name, own = self._stored.get(storage_of(tensor), ("", tensor))
        if not name or own.ndim < 2 or 0 in own.stride():
            return None
        offset = tensor.storage_offset() - own.storage_offset()
        if tensor.shape[1:] == own.shape[1:] and tensor.stride() == own.stride():
            return name, offset // own.stride(0), None, False
        if own.ndim not in (2, 3) or tensor.ndim not in (2, own.ndim):
            return None
        index, offset = divmod(int(offset), own.stride(0)) if own.ndim > tensor.ndim else (None, offset)
        sides = own.stride()[-2:]
        if tensor.stride()[-2:] == sides and tensor.shape[-1] == own.shape[-1]:
            return name, offset // sides[0], index, False
        if tensor.stride()[-2:] == sides[::-1] and tensor.shape[-2] == own.shape[-1]:
            return name, offset // sides[0], index, True
        return None

    def _layer(self, name: str, operands: list[Tensor], out: Tensor) -> Tensor | None:
        """Record the call of a layer; its output, detached. None where no operand is a weight."""
        if len(operands) < 2:
            return None
        x, weight = operands[1:3] if name in ("addmm", "baddbmm") else operands[:2]
        by_rows = name == "linear" or name in CONVOLUTIONS
        found = self._located(weight)
        if found is None or (not by_rows and self._located(x) is not None):
            return None
        tensor, start, index, transposed = found
        bias = operands[0] if name in ("addmm", "baddbmm") else operands[2] if by_rows and len(operands) > 2 else None
        if name in CONVOLUTIONS:
            if out.ndim != weight.ndim or transposed:
                return None
            out_dim, in_dim, channel, pointwise = 0, 1, 1, weight[0, 0].numel() == 1
        else:
            rows = self._own(weight).ndim - 2
            out_dim, in_dim = (rows + 1, rows) if by_rows == transposed else (rows, rows + 1)
            channel, pointwise = -1, True
            start = start if out_dim == rows else 0
        ended = out.detach().clone().requires_grad_()
        known = "" if bias is None else self._names.get(id(bias), "")
        plain = bias is None or bool(known)
        made = Call(self.stack[-1], tensor, known, out_dim, in_dim, start, index, x, ended, channel, pointwise, plain)
        self.run.calls.append(made)
        return ended.clone()  # the model may change it in place

    def _own(self, weight: Tensor) -> Tensor:
        return self._stored[storage_of(weight)][1]

    def _table(self, operands: list[Tensor], out: Tensor) -> Tensor:
        name = next((self._names[id(t)] for t in operands if id(t) in self._names), None)
        if name is None:
            return out
        ended = out.detach().clone().requires_grad_()
        self.run.tables.append((name, ended))
        return ended.clone()

    # norms

    def _normed(self, x: Tensor, out: Tensor) -> Tensor:
        """The same values, whose derivatives pass entry by entry, as if the norm only multiplied each of them."""
        if out.shape != x.shape or not out.is_floating_point():
            return out
        factor = torch.where(x == 0, torch.ones_like(x), out / x).detach()
        passed = out.detach() + ((x - x.detach()) * factor).to(out.dtype)
        if passed.requires_grad:  # not of the input of the model
            self.run.normed.append(passed)
        return self.label([x], passed, "norm")

    def _functional(self, name: str, args: Any, kwargs: Any, x: Tensor, out: Tensor) -> Tensor:
        """The result of a function that is a norm, which is recorded if its gain and shift are parameters or none."""
        passed, kind = self._normed(x, out), _LAST.get(name)
        given = dict(zip(("input", "normalized_shape", "weight", "bias"), args, strict=False)) | kwargs
        of = {part: t for part in ("weight", "bias") if isinstance(t := given.get(part), Tensor)}
        names = {part: self._names.get(id(t)) for part, t in of.items()}
        if kind is None or len(given["normalized_shape"]) > 1 or None in names.values():
            return passed
        gains, shift = tuple(n for n in [names.get("weight")] if n), names.get("bias") or ""
        of_input = not passed.requires_grad
        made = Normed(self.stack[-1], gains, x.detach(), passed.requires_grad_(), frozenset(), kind, shift)
        self.run.functional.append(made)
        return passed.clone() if of_input else passed  # the model may change it in place

    def _norm_hook(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """A forward hook of a module without children: a norm if it removes the scale of its input."""
        given = [t for t in tensors_of(args, kwargs) if t.is_floating_point()]
        if len(given) != 1 or not isinstance(out, Tensor) or out.shape != given[0].shape:
            return None
        if out.ndim < 2 or not out.numel():
            return None
        shape = (2, *out.shape[1:]) if out.ndim == 4 else (4, out.shape[-1])
        key = (type(module), shape, tuple(p.shape for p in module.parameters()))
        if key not in self._known:
            stated = facts.facts_of(module).removes_scale
            self._paused = True
            measured = None if stated is not None else facts.measure(without_hooks(module), [shape]).removes_scale
            self._paused = False
            self._known[key] = bool(stated or measured)
        if not self._known[key]:
            return None
        self._paused = True
        gains = _gains_of(module, given[0])
        self._paused = False
        names = tuple(n for n in (self._names.get(id(module._parameters[gain])) for gain in gains) if n)
        if len(names) < len(gains):  # other tensors are in the place of the model's, as in functional_call
            return self._normed(given[0], out)
        self.run.norms.update(dict.fromkeys(names))
        passed = self._normed(given[0], out)
        of_input = not passed.requires_grad
        over = frozenset(self.run.began) - frozenset(self.stack)
        self.run.gained.append(Normed(self.stack[-1], names, given[0].detach(), passed.requires_grad_(), over))
        return passed.clone() if of_input else passed  # the model may change it in place

    # attention

    def _kernel_hook(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """A forward hook of a registered attention without weights: written out if that gives the same result."""
        known = facts.facts_of(module)
        if known.attends is None or not isinstance(out, Tensor):
            return None
        query, key, value = known.attends(*args, **kwargs)
        for causal in (False, True):
            made = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
            whole = made if known.returns is None else known.returns(made)
            if whole.shape == out.shape and _alike(whole, out):
                self.run.products[-1].kernel = True
                return whole
            self.run.products.pop()
        return None

    def packed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """torch's attention, written out; recorded only if the written form gives the same result."""
        result = func(*args, **kwargs)
        self._uses(tensors_of(args, kwargs))
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        a = given.arguments
        odd = (a["bias_k"], a["static_k"], a["static_v"])
        if a["add_zero_attn"] or any(each is not None for each in odd) or a["query"].ndim == 2:
            self.run.unknown[self.stack[-1]] = say("torch's attention has further keys, or an input without a batch")
            return result
        before, bias = len(self.run.calls), a["in_proj_bias"]
        separate = a["use_separate_proj_weight"]
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        weights = [a[name] for name in names] if separate else a["in_proj_weight"].chunk(3)
        shifts, made = [None] * 3 if bias is None else bias.chunk(3), []
        places = [self._located(weight) for weight in weights]
        known = "" if bias is None else self._names.get(id(bias), "")
        inputs = (a["query"], a["key"], a["value"])
        for n, (place, weight, shift, x) in enumerate(zip(places, weights, shifts, inputs, strict=True)):
            if place is None:
                self.run.unknown[self.stack[-1]] = say("a weight of torch's attention is computed from other tensors")
                return result
            ended = F.linear(x, weight, shift).detach().requires_grad_()
            plain = bias is None or bool(known)
            first = n * len(weight) - place[1]  # the biases of separate weights are one tensor
            made_by = Call(self.stack[-1], place[0], known, 0, 1, place[1], None, x, ended, -1, True, plain, first)
            self.run.calls.append(made_by)
            made.append(ended.clone().unflatten(-1, (a["num_heads"], -1)).permute(1, 2, 0, 3))
        query, key, value = made
        logits = query @ key.mT * query.shape[-1] ** -0.5
        out = (logits + _mask_of(a["attn_mask"], a["key_padding_mask"], logits)).softmax(-1) @ value
        x = out.permute(2, 0, 1, 3).flatten(2)
        y = F.linear(x, a["out_proj_weight"], a["out_proj_bias"])
        if not _alike(y, result[0]):
            del self.run.calls[before:]
            self.run.unknown[self.stack[-1]] = say("torch's attention gives another result than its formula")
            return result
        path = self.stack[-1]
        self.found(Product(path, query, key, value, out, logits, around=path), (), {})
        operands = [each for each in (x, a["out_proj_weight"], a["out_proj_bias"]) if each is not None]
        whole = self._layer("linear", operands, y)
        return (y if whole is None else whole, *result[1:])


@torch.inference_mode(False)  # in which no gradient could be told
def record(model: nn.Module, example: Any) -> Recording:
    """Run a model in evaluation mode on its twin, and record it.

    Raises: InvalidArgumentError for weights that were made in inference mode.
    """
    refuse_inference("a run that tells by gradients what reads what", model.named_parameters())
    with fitting(model, example, "example="), evaluating(model) as plain, torch.enable_grad(), ExitStack() as ends:
        ends.enter_context(sdpa_kernel(SDPBackend.MATH))  # the one with second derivatives
        recorder = Recorder(plain)
        for site in sites(plain):
            module = site.module
            if isinstance(module, torch.jit.ScriptModule):  # it takes no hooks, and nothing of its inside is seen
                continue
            ends.enter_context(module.register_forward_pre_hook(partial(recorder.enter, site.path)))
            if not module._modules and all(p.ndim < 2 for p in module.parameters()):
                ends.enter_context(module.register_forward_hook(recorder._norm_hook, with_kwargs=True))
            if facts.facts_of(module).attends is not None:
                ends.enter_context(module.register_forward_hook(recorder._kernel_hook, with_kwargs=True))
            ends.enter_context(module.register_forward_hook(recorder.leave, always_call=True))
        with recorder:
            recorder.run.outputs = call(plain, example)
    return recorder.run


def without_hooks(module: nn.Module) -> nn.Module:
    plain = twin_of(module)
    plain._forward_hooks.clear()
    plain._forward_pre_hooks.clear()
    return plain


def _gains_of(norm: nn.Module, x: Tensor) -> list[str]:
    """The parameters by which a norm multiplies: the derivative of the sum of its results differs between entries."""
    own = {n: p.detach().clone().requires_grad_() for n, p in norm._parameters.items() if p is not None and p.ndim == 1}
    if not own:
        return []
    # The model may have turned gradients off around the norm, or recompute what it saves.
    with torch.enable_grad(), as_usual_saved():
        given = x.detach().requires_grad_()
        out = torch.func.functional_call(without_hooks(norm), own, (given,))
        # With the input's: torch 2.13 crashes where that of a group norm in channels_last is not asked for.
        *found, _ = torch.autograd.grad(out.sum(), [*own.values(), given], allow_unused=True)
    return [
        n
        for n, g in zip(own, found, strict=True)
        if g is not None and float(g.max() - g.min()) > 1e-4 * float(g.abs().max())
    ]


def noise_like(x: Tensor, name: str, number: int = 0) -> Tensor:
    """Normal numbers, drawn for this name and number, in the shape, dtype and device of `x`."""
    return normal(x.shape, number, name).to(x)


def random_mask(shape: Sequence[int], name: str, number: int) -> Tensor:
    """Truth values, about half of them true, drawn for this name and number, on the CPU."""
    return torch.rand(tuple(shape), generator=generator(number, name), device="cpu", dtype=torch.float32) < 0.5


def same(a: Tensor, b: Tensor, share: float | None = None) -> bool:
    """Whether two results differ by at most a share of the largest entry of `b`, by default 50 roundings."""
    share = 50 * torch.finfo(b.dtype).eps if share is None else share
    return float((a - b).detach().abs().max()) <= share * float(b.detach().abs().max())


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two results are equal up to rounding; NaN counts as 0."""
    a, b = a.nan_to_num(), b.nan_to_num()
    return same(a, b, 100 * torch.finfo(b.dtype).eps)


def _mask_of(mask: Tensor | None, padding: Tensor | None, logits: Tensor) -> Tensor:
    """What torch's attention adds to logits of shape (batch, heads, queries, keys)."""
    added = torch.zeros_like(logits).detach()
    for given in (mask, padding):
        if given is None:
            continue
        shape = (len(logits), 1, 1, -1) if given is padding else (-1, logits.shape[1], *logits.shape[2:])
        given = given.view(shape) if given is padding or given.ndim == 3 else given
        added = added.masked_fill(given, -torch.inf) if given.dtype == torch.bool else added + given
    return added
