"""Upper bounds of the Lipschitz constants of all tensors in a network, along its traced graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod, sqrt
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from gonio.errors import NotApplicableError
from gonio.geometry import layout_of, nonnegative_norm, operator_norm_bound
from gonio.geometry.certified import ROUNDING
from gonio.surgery.facts import (
    SLOPES,
    TORCH_NORMS,
    UNKNOWN,
    WEIGHTED,
    applied_weight,
    facts_of,
    has_changing_hooks,
    tail_of,
)
from gonio.surgery.graph import Graph, called_function, trace

_SUMS = frozenset(("add", "iadd", "add_", "sub", "isub", "sub_"))
_PRODUCTS = frozenset(("mul", "imul", "mul_", "truediv", "div", "div_", "itruediv"))
_STACKS = frozenset(("cat", "concat", "stack", "maximum", "minimum"))  # an entry of the output is one of the inputs'
_IN_PLACE = frozenset(("iadd", "isub", "imul", "itruediv"))
_FRESH = _STACKS | {"add", "sub", "mul", "div", "truediv"}  # they return new memory
_SHAPES = frozenset(("size", "dim", "numel", "is_floating_point"))
_ATTRIBUTES = frozenset(("shape", "ndim", "dtype", "device", "is_cuda"))
# Functions that select entries, each at most once, or that change nothing but the dtype.
_SELECTING = frozenset((
    "sort", "topk", "amax", "amin", "max", "min", "clamp", "clamp_", "clamp_min", "clamp_max", "clip",
    "clone", "contiguous", "detach", "float", "double", "to", "type_as",
))  # fmt: skip
# Linear functions with entries ≥ 0: their norm is measured on the shape at hand.
_COPYING = frozenset((
    "flatten", "reshape", "view", "permute", "transpose", "squeeze", "unsqueeze", "movedim", "swapaxes", "t",
    "T", "mT", "unflatten", "chunk", "split", "unbind", "narrow", "select", "index_select", "getitem",
    "expand", "repeat", "repeat_interleave", "roll", "flip", "mean", "sum", "pad", "interpolate", "dropout",
    "dropout_", "dropout1d", "dropout2d", "dropout3d", "unfold", "pixel_shuffle", "pixel_unshuffle",
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
))  # fmt: skip
# Functions that the module of torch with the same arguments computes.
_AS_MODULES = {
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
    "celu": nn.CELU,
    "hardtanh": nn.Hardtanh,
    "softmax": nn.Softmax,
    "log_softmax": nn.LogSoftmax,
    **{f"max_pool{dims}d": getattr(nn, f"MaxPool{dims}d") for dims in (1, 2, 3)},
    **{f"adaptive_max_pool{dims}d": getattr(nn, f"AdaptiveMaxPool{dims}d") for dims in (1, 2, 3)},
}


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A layer or operation that changes the bound.

    Attributes:
        path: of the layer, of both where a norm is merged into the layer before it, or the name of the operation in
            its module.
        kind: the class of the layer, or the function.
        factor: the bound of its output over the largest bound among its inputs.
        upper: the bound of its output, as a function of the network's input.
        lower: the largest quotient ‖h(x) − h(y)‖ / ‖x − y‖ at its output h, over the pairs of the lower bound.
        widens: its share of the slack: upper / lower at its output, over the largest of it at its inputs.
    """

    path: str
    kind: str
    factor: float
    upper: float
    lower: float
    widens: float

    @property
    def slack(self) -> float:
        """The quotient upper / lower at its output."""
        return quotient(self.upper, self.lower)


def quotient(a: float, b: float) -> float:
    """a / b for a, b ≥ 0; infinity for a / 0, and 1 for 0 / 0."""
    return a / b if b > 0 else (inf if a > 0 else 1.0)


class Interpreter(fx.Interpreter):
    """Runs a traced graph on the layers of its model, and reads the constants of the trace."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.model, graph=graph.nodes[0].graph)
        self.extra_traceback = False  # an error says where by itself
        self.traced = graph

    def fetch_attr(self, target: str) -> Any:
        return self.traced.constants[target] if target in self.traced.constants else super().fetch_attr(target)


class UpperBounds(Interpreter):
    """Runs the graph on one input and records the bound of every node that depends on it."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.upper: dict[fx.Node, float] = {}
        self.shapes: dict[fx.Node, torch.Size] = {}
        self.merged: dict[fx.Node, fx.Node] = {}  # norms, and the layers that their bounds include

    @torch.no_grad()
    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = getattr(self, n.op)(n.target, args, kwargs)
        self.shapes[n] = next((x.shape for x in tree_leaves(result) if isinstance(x, Tensor)), torch.Size())
        if n.op == "placeholder" and isinstance(result, Tensor) and not self.upper:
            self.upper[n] = 1.0
        elif (terms := [term for term in _inputs(n) if term in self.upper]) and not _reads_shape(n):
            if n.op == "output":
                self.upper[n] = sqrt(sum(self.upper[term] ** 2 for term in terms)) * (1 + ROUNDING)
            elif n.op == "call_module":
                self.upper[n] = self._layer(n, terms)
            else:
                self.upper[n] = self._function(n, terms, args, kwargs, result)
        return result

    def rows(self, gains: Mapping[fx.Node, float]) -> tuple[Factor, ...]:
        """One row for each weighted layer and each other node that changes the bound."""
        found = []
        for node, upper in self.upper.items():
            layer = self.merged.get(node, node)
            terms = [term for term in _inputs(layer) if term in self.upper]
            factor = quotient(upper, max((self.upper[term] for term in terms), default=1.0))
            idle = abs(factor - 1) < 1e-6 and not isinstance(self.traced.called(layer), WEIGHTED)
            if not terms or idle or node.op == "output" or node in self.merged.values():
                continue
            known = max(quotient(self.upper[term], gains[term]) for term in terms)
            nodes = dict.fromkeys((layer, node))
            found.append(
                Factor(
                    path=" + ".join(map(_path, nodes)),
                    kind=" + ".join(map(self._kind, nodes)),
                    factor=factor,
                    upper=upper,
                    lower=gains[node],
                    widens=quotient(quotient(upper, gains[node]), known),
                )
            )
        return tuple(found)

    def _refusal(self, node: fx.Node, why: str) -> NotApplicableError:
        do = "State a constant of its class with gonio.surgery.facts.register(), or certify the part before it."
        return NotApplicableError("certify", _path(node), why, do, action="bound", kind=self._kind(node))

    def _kind(self, node: fx.Node) -> str:
        module = self.traced.called(node)
        return type(module).__name__ if module is not None else called_function(node) or str(node.target)

    # --- layers ---------------------------------------------------------------------------------------

    def _layer(self, node: fx.Node, terms: Sequence[fx.Node]) -> float:
        module: Any = self.traced.called(node)
        if has_changing_hooks(module):
            raise self._refusal(node, "it has forward hooks, which may change its output")
        facts = facts_of(module)
        if facts.why_not_affine is not None and facts.why_not_affine(module) is None:
            return self._affine(node, module) * prod(self._stated(node, act, node) for act in tail_of(module))
        if applied_weight(module) is not None:
            return self.upper[terms[0]] * self._weighted(node, module)
        if len(_inputs(node)) != 1:
            raise self._refusal(node, "it takes several tensors")
        factor = self._stated(node, module, terms[0])
        return self.upper[terms[0]] * self._in_place(node, factor, getattr(module, "inplace", False))

    def _stated(self, node: fx.Node, module: nn.Module, source: fx.Node) -> float:
        """The constant of a layer by its facts, for inputs of the shape that `source` has."""
        constant = facts_of(module).lipschitz
        if callable(constant):
            constant = constant(module, torch.ones(self.shapes[source], dtype=torch.float64, device="cpu"))
        if constant is not None and constant < inf:
            return constant
        if constant is None and (inside := self._inside(module, source)) is not None:
            return inside
        if isinstance(module, TORCH_NORMS):
            eps: Any = getattr(module, "eps", None)
            steep = f"{eps**-0.5:.4g} · |weight|" if eps else "infinity"
            raise self._refusal(node, f"its slope where its input is nearly constant reaches {steep}")
        raise self._refusal(node, f"no Lipschitz constant is known for {type(module).__name__}")

    def _inside(self, module: nn.Module, source: fx.Node) -> float | None:
        """The constant of a layer of unknown type by the functions that its forward calls; None if that gives none."""
        if facts_of(module) is not UNKNOWN or type(module).__module__.startswith("torch.nn."):
            return None
        graph = trace(module, training=False)
        x = torch.ones(self.shapes[source], dtype=torch.float64, device="cpu")
        try:
            inner = UpperBounds(graph)
            inner.run(x)
        except Exception:  # no graph, a refusal inside, or the layer's own code
            return None
        kept = bool((x == 1).all()) or getattr(module, "inplace", False)
        return inner.upper.get(graph.nodes[-1], 0.0) if kept else None

    def _weighted(self, node: fx.Node, layer: Any, scale: Tensor | None = None) -> float:
        """The norm of a linear layer or convolution with its padding, and with its outputs scaled."""
        layout, applied = layout_of(layer), applied_weight(layer)
        weight: Tensor = (layer.weight if applied is None else applied).detach()
        if scale is not None and layout.transposed:
            scale = scale.view(layout.groups, 1, -1, *[1] * (weight.dim() - 2))
            weight = (weight.unflatten(0, (layout.groups, -1)) * scale).flatten(0, 1)
        elif scale is not None:
            weight = weight * scale.view(-1, *[1] * (weight.dim() - 1))
        norm = operator_norm_bound(weight, layout=layout)
        if layout.padding_mode == "zeros":
            return norm
        out, sizes = self.shapes[node][2:], self.shapes[node.all_input_nodes[0]][2:]
        whole = all(n * s == size for n, s, size in zip(out, layer.stride, sizes, strict=True))
        if layout.padding_mode == "circular" and whole:
            return norm
        widths, mode = layer._reversed_padding_repeated_twice, layer.padding_mode
        return norm * nonnegative_norm(
            lambda x: F.pad(x, widths, mode=mode), torch.ones(1, 1, *sizes, device="cpu", dtype=torch.float32)
        )

    def _affine(self, node: fx.Node, norm: Any) -> float:
        """Batch norm with running statistics, merged into the layer before it if it alone reads that."""
        scale = (norm.running_var + norm.eps).rsqrt() * (1.0 if norm.weight is None else norm.weight)
        source = node.all_input_nodes[0]
        layer: Any = self.traced.called(source)
        known = applied_weight(layer) is not None and layer.weight.dim() == len(self.shapes[node])
        if known and len(source.users) == 1:
            self.merged[node] = source
            return self.upper[source.all_input_nodes[0]] * self._weighted(source, layer, scale)
        return self.upper[source] * float(scale.abs().max()) * (1 + ROUNDING)

    def _in_place(self, node: fx.Node, factor: float, in_place: bool) -> float:
        """The factor; refused where a layer or function enlarges in place what others read too."""
        source = _inputs(node)[0]
        while in_place and factor > 1:
            if sum(not _reads_shape(user) for user in source.users) > 1:
                raise self._refusal(node, f"it changes its input in place, which is read elsewhere too ({source.name})")
            fresh = applied_weight(self.traced.called(source)) is not None or self.traced.facts(source).removes_scale
            if fresh or not source.all_input_nodes or called_function(source) in _FRESH:
                break
            source = source.all_input_nodes[0]
        return factor

    # --- functions ------------------------------------------------------------------------------------

    def _function(self, node: fx.Node, terms: Sequence[fx.Node], args: Any, kwargs: Any, result: Any) -> float:
        name = called_function(node) or (str(args[1]) if node.target is getattr else "")
        base, bounds = name.removesuffix("_"), [self.upper[term] for term in terms]
        floats = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float64)]
        if not floats:
            raise self._refusal(node, "it computes values that are not in floating point from an activation")
        spread = [max(1.0, floats[0].numel() / self.shapes[term].numel()) for term in terms]  # copies by broadcasting
        in_place = name.endswith("_") or name in _IN_PLACE or bool(kwargs.get("inplace"))
        if name in _SUMS and not kwargs:
            total = sum(bound * sqrt(copies) for bound, copies in zip(bounds, spread, strict=True))
            return max(bounds) * self._in_place(node, total / max(bounds), in_place) if max(bounds) else 0.0
        if name in _STACKS:
            copies = spread if base in ("maximum", "minimum") else [1.0] * len(terms)
            return sqrt(sum(bound**2 * more for bound, more in zip(bounds, copies, strict=True)))
        factor = None
        if len(terms) == 1:
            factor = self._unary(node, name, args, kwargs)
        if factor is None:
            raise self._refusal(node, _why_unbounded(name, len(terms)))
        return bounds[0] * self._in_place(node, factor * sqrt(spread[0] if name not in _COPYING else 1.0), in_place)

    def _unary(self, node: fx.Node, name: str, args: Any, kwargs: Any) -> float | None:
        """The constant of a function of one activation; None if it is not known."""
        base, first = name.removesuffix("_"), node.args and node.args[0] in self.upper
        if name in _PRODUCTS and not kwargs and (first or base in ("mul", "imul")):
            factor = args[1] if first else args[0]
            other = factor if isinstance(factor, Tensor) else torch.tensor(factor, dtype=torch.float64, device="cpu")
            other = other.double().abs()
            return float(other.max() if "mul" in base else 1 / other.min()) * (1 + ROUNDING)
        if not first:
            return None
        if base in _AS_MODULES:
            options = {key: value for key, value in kwargs.items() if key not in ("_stacklevel", "dtype")}
            given = args[1:2] if base.endswith("softmax") else args[1:]  # others than dim concern the dtype
            return self._stated(node, _AS_MODULES[base](*given, **options), _inputs(node)[0])
        if base in SLOPES:
            return SLOPES[base]
        if name in _SELECTING or (name == "getitem" and not isinstance(args[0], Tensor)):
            return 1.0
        if name in ("linear", "matmul"):
            weight = args[1] if len(args) > 1 else kwargs.get("weight", kwargs.get("other"))
            return operator_norm_bound(weight) if isinstance(weight, Tensor) and weight.dim() == 2 else None
        if name in _COPYING:
            run = lambda x: getattr(self, node.op)(node.target, (x, *args[1:]), kwargs)  # noqa: E731
            found = nonnegative_norm(run, args[0])
            return found if found < inf else None
        return None


def _why_unbounded(name: str, terms: int) -> str:
    if name == "scaled_dot_product_attention":
        return "attention by dot products has no global Lipschitz constant"
    if terms > 1 and (name in _PRODUCTS or name in ("matmul", "bmm", "einsum")):
        return "a product of two activations has no global Lipschitz constant"
    return "no Lipschitz constant is known for it with these arguments"


def _inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads, as often as it reads them."""
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def _reads_shape(node: fx.Node) -> bool:
    """Whether the result depends on the shape and dtype of the input alone."""
    return called_function(node) in _SHAPES or (node.target is getattr and node.args[1] in _ATTRIBUTES)


def _path(node: fx.Node) -> str:
    """The path of a layer; of a function, its name behind the path of the module that calls it."""
    if node.op == "call_module":
        return str(node.target)
    around = [path for path, _ in node.meta.get("nn_module_stack", {}).values() if path]
    return ".".join((*around[-1:], node.name))
