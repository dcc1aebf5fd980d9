"""The layers and bare parameters that compute a model's outputs, found by running the model on shapes alone.

Every parameter and the input become tensors without data, on torch's meta device, so that a run costs neither memory
nor time; a model that needs values is run on the input itself. From each output tensor the autograd graph is followed
back to the first layers with weights. A parameter of two dimensions that no known layer has is a weight too if linear
functions take it whole, and nothing else does: `F.linear(x, w)`, `x @ w`, `torch.einsum("bi,io->bo", x, w)`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from gonio.editing.memory import looks_at_parameters, writes_taken_back
from gonio.editing.twin import set_tensors_, twin_of
from gonio.editing.where import sites
from gonio.errors import first_line
from gonio.execution import is_sharded
from gonio.geometry.views import has_filters
from gonio.seeding import state_kept
from gonio.surgery.equivalent import call, examples_for
from gonio.surgery.facts import TABLES
from gonio.surgery.products import returned, tensors_of

_Nodes = dict[Any, str]  # by the node of autograd that made an output: the path of its layer, or a parameter's name
_Uses = dict[str, set[bool | None]]  # by name: whether filters are on dim 1; None for another function


@dataclass(frozen=True)
class Roles:
    """What a run of a model shows of its weights.

    Attributes:
        ends: the output layers, and the bare parameters that compute an output, by `id`.
        bare: by `id`, the parameters of no known layer that are weights, and whether their filters are on dim 1.
        unknown: why the output layers are not known; empty if they are.
    """

    ends: set[int]
    bare: Mapping[int, bool] = field(default_factory=dict)
    unknown: str = ""


@torch.inference_mode(False)  # gradients tell the layers
def roles_of(model: nn.Module) -> Roles:
    """The output layers, and the weights that are bare parameters.

    An output layer is the last layer with a weight on every path to some output of the model, in evaluation or in
    training. Outputs that several layers add to, as the residual stream of a model without a head, have none.

    Example:
        >>> from gonio.penalty.output_layers import roles_of
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> roles_of(model).ends == {id(model[2])}
        True
    """
    sharded = any(is_sharded(parameter) for parameter in model.parameters())  # its hooks would gather them in a run
    reason = "its parameters are sharded" if sharded else "the model has no layer that tells its input size"
    cores = [] if sharded else [*_cores(model)]
    for on_shapes, inner in itertools.product((True, False), cores):
        for example in examples_for(inner):
            try:
                found, uses = _from_mode(inner, example, training=False, on_shapes=on_shapes)
            except Exception as error:  # a model can raise anything at a size that it does not take
                reason = first_line(error, 100, kind=True)
                continue
            with suppress(Exception):  # training may need more, such as labels
                more, others = _from_mode(inner, example, training=True, on_shapes=on_shapes)
                found |= more
                for name, use in others.items():
                    uses.setdefault(name, set()).update(use)
            layers = [site.module for site in sites(inner) if site.path in found]
            parameters = dict(inner.named_parameters())
            bare = {name: use.pop() for name, use in uses.items() if len(use) == 1 and None not in use}
            ends = {id(layer) for layer in layers if layer is not model}
            ends |= {id(parameters[name]) for name in bare if name in found}
            return Roles(ends, {id(parameters[name]): bool(columns) for name, columns in bare.items()})
    named = {id(layer) for layer in _named(model)}
    return Roles(named, unknown="" if named else f"the model could not be run ({reason})")


def _cores(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and what it holds if all of its parameters are in one child, as in a wrapper of a trainer."""
    yield model
    inside = [child for child in model.children() if any(True for _ in child.parameters())]
    if len(inside) == 1 and not model._parameters and not isinstance(model, nn.Sequential):
        yield from _cores(inside[0])


def _trainable(model: nn.Module, *, on_shapes: bool) -> nn.Module:
    """A twin whose parameters all require a gradient, which is none of the model's.

    Args:
        on_shapes: with tensors without data in the place of all parameters and buffers.
    """
    twin, bare = twin_of(model), dict[int, Tensor]()
    for tensor in (*twin.parameters(), *twin.buffers()):
        trains = isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex())
        if on_shapes and not (tensor.is_meta and tensor.requires_grad):
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            bare[id(tensor)] = nn.Parameter(new) if trains and new.is_floating_point() else new
        elif trains and not on_shapes:
            bare[id(tensor)] = nn.Parameter(tensor.detach())
    set_tensors_(twin, bare)  # the same one for a shared tensor
    return twin


def _from_mode(model: nn.Module, example: Any, *, training: bool, on_shapes: bool) -> tuple[set[str], _Uses]:
    """The paths of the output layers, the names of parameters among them, and the functions that take bare ones."""
    made: _Nodes = {}

    def record(path: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                made[tensor.grad_fn] = path

    inputs = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, example) if on_shapes else example
    twin = _trainable(model, on_shapes=on_shapes).train(training)
    weighted = [site for site in sites(twin) if not isinstance(site.module, TABLES)]
    layers = {s.path: s.module for s in weighted if any(has_filters(s.module, n) for n in s.module._parameters)}
    functions = _Functions(twin, {id(p) for layer in layers.values() for p in layer._parameters.values()}, made)
    with torch.enable_grad(), state_kept(), writes_taken_back(twin), ExitStack() as hooks, functions:
        for path, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(record, path)))
        outputs = call(twin, inputs)
    ends = [tensor.grad_fn for tensor in returned(outputs) if tensor.grad_fn is not None]
    last = {path for end in ends for path in _last(end, made)}
    return {path for path in last if path not in layers or has_filters(layers[path])}, functions.uses


class _Functions(TorchFunctionMode):
    """Records the functions that take a parameter of two dimensions which is in none of the known layers."""

    def __init__(self, model: nn.Module, known: set[int], made: _Nodes) -> None:
        super().__init__()
        tables = {id(p) for m in model.modules() if isinstance(m, TABLES) for p in m._parameters.values()}
        self._known, self._made = known | tables, made
        named = model.named_parameters()
        self._bare = {id(p): name for name, p in named if p.ndim == 2 and id(p) not in self._known}
        self.uses: _Uses = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if looks_at_parameters() or not isinstance(out, Tensor) or self._name(out):  # a shape, or a view of one
            return out
        operands = tensors_of(args, kwargs or {})
        for place, operand in enumerate(operands):
            if not (name := self._name(operand)):
                continue
            columns = self._columns(getattr(func, "__name__", ""), args, operands, place)
            flipped = _flipped(operand)
            self.uses.setdefault(name, set()).add(None if None in (columns, flipped) else columns != flipped)
            if columns is not None and out.grad_fn is not None:
                self._made[out.grad_fn] = name
        return out

    def _name(self, tensor: Tensor) -> str:
        """The bare parameter that a tensor is, or is a view of."""
        return self._bare.get(id(tensor), "") or self._bare.get(id(tensor._base), "")

    def _columns(self, function: str, args: Any, operands: list[Tensor], place: int) -> bool | None:
        """Whether the filters are the columns of this operand; None where no linear function takes it as a weight."""
        if function == "linear":
            return False if place == 1 else None
        if function == "einsum":
            return _kept_letter(args[0], place) if isinstance(args[0], str) else None
        first = {"matmul": 0, "__matmul__": 0, "mm": 0, "addmm": 1}.get(function)
        if first is None or place < first:
            return None
        other = operands[first + 1 if place == first else first]
        fed = id(other) in self._known or id(other._base) in self._known  # it is what a layer's weight is applied to
        return None if place == first and fed else place != first


def _flipped(operand: Tensor) -> bool | None:
    """Whether a view of a parameter is its transpose; None for a part of it, or another shape."""
    whole = operand if operand._base is None else operand._base
    if operand.shape == whole.shape and operand.stride() == whole.stride():
        return False
    same = operand.shape == whole.shape[::-1] and operand.stride() == whole.stride()[::-1]
    return True if same else None


def _kept_letter(equation: str, place: int) -> bool | None:
    """Whether the result of `torch.einsum` keeps the second dimension of this operand alone."""
    inputs, _, result = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")[place]
    kept = [letter in result for letter in letters]
    return kept[1] if len(letters) == 2 and kept[0] != kept[1] and "." not in letters else None


def _last(end: Any, made: _Nodes) -> set[str]:
    """The first layers on the way back from an output; none if one of them feeds another."""
    first = {node for node in _reached([end], made) if node in made}
    below = _reached([node for start in first for node, _ in start.next_functions if node is not None], {})
    return set() if first & below else {made[node] for node in first}


def _reached(start: list[Any], stops: _Nodes) -> set[Any]:
    seen, pending = set(start), list(start)
    while pending:
        node = pending.pop()
        if node not in stops:
            new = [after for after, _ in node.next_functions if after is not None and after not in seen]
            seen.update(new)
            pending += new
    return seen


def _named(model: nn.Module) -> Iterator[nn.Module]:
    """The output layers of a model that cannot be run: the last of a sequence, or as timm and transformers say."""
    if isinstance(model, nn.Sequential):
        yield from _last_weighted(model)
    for module in model.modules():
        for method in ("get_output_embeddings", "get_classifier"):
            if hasattr(type(module), method):
                try:
                    found = getattr(module, method)()
                except Exception:  # the model's own code
                    continue
                for each in found if isinstance(found, tuple) else (found,):
                    yield from () if each is None else _last_weighted(each)


def _last_weighted(module: nn.Module) -> list[nn.Module]:
    return [site.module for site in sites(module) if has_filters(site.module)][-1:]
