"""The layers that compute a model's outputs, found by running the model on shapes alone.

Every parameter and the input become tensors without data, on torch's meta device, so that a run costs neither memory
nor time; a model that needs values is run on the input itself. From each output tensor the autograd graph is followed
back to the first layers with weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gonio.editing.twin import set_tensors_, twin_of
from gonio.editing.where import sites
from gonio.editing.written import writes_taken_back
from gonio.errors import first_line
from gonio.execution import is_sharded
from gonio.geometry.views import has_filters
from gonio.seeding import state_kept
from gonio.surgery.equivalent import call, examples_for
from gonio.surgery.facts import TABLES

_Nodes = dict[Any, str]  # by the node of autograd that made an output: the path of its layer


@torch.inference_mode(False)  # gradients tell the layers
def output_layers(model: nn.Module) -> tuple[set[int], str]:
    """The layers by `id`, and why they are not known; the reason is empty if they are.

    An output layer is the last layer with a weight on every path to some output of the model, in evaluation or in
    training. Outputs that several layers add to, as the residual stream of a model without a head, have none.

    Example:
        >>> from gonio.penalty.output_layers import output_layers
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> output_layers(model) == ({id(model[2])}, "")
        True
    """
    sharded = any(is_sharded(parameter) for parameter in model.parameters())  # its hooks would gather them in a run
    reason = "its parameters are sharded" if sharded else "the model has no layer that tells its input size"
    cores = [] if sharded else [*_cores(model)]
    for on_shapes, inner in itertools.product((True, False), cores):
        for example in examples_for(inner):
            try:
                found = _from_mode(inner, example, training=False, on_shapes=on_shapes)
            except Exception as error:  # a model can raise anything at a size that it does not take
                reason = first_line(error, 100, kind=True)
                continue
            with suppress(Exception):  # training may need more, such as labels
                found |= _from_mode(inner, example, training=True, on_shapes=on_shapes)
            layers = [site.module for site in sites(inner) if site.path in found]
            return {id(layer) for layer in layers if layer is not model}, ""
    named = list(_named(model))
    return {id(layer) for layer in named}, "" if named else f"the model could not be run ({reason})"


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


def _from_mode(model: nn.Module, example: Any, *, training: bool, on_shapes: bool) -> set[str]:
    """The paths of the output layers."""
    made: _Nodes = {}

    def record(path: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                made[tensor.grad_fn] = path

    inputs = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, example) if on_shapes else example
    twin = _trainable(model, on_shapes=on_shapes).train(training)
    weighted = [site for site in sites(twin) if not isinstance(site.module, TABLES)]
    layers = {s.path: s.module for s in weighted if any(has_filters(s.module, n) for n in s.module._parameters)}
    with torch.enable_grad(), state_kept(), writes_taken_back(twin), ExitStack() as hooks:
        for path, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(record, path)))
        outputs = call(twin, inputs)
    direct = outputs.values() if isinstance(outputs, Mapping) else outputs
    direct = direct if not isinstance(direct, Tensor) else (direct,)
    ends = [tensor.grad_fn for tensor in direct if isinstance(tensor, Tensor) and tensor.grad_fn is not None]
    return {path for end in ends for path in _last(end, made) if has_filters(layers[path])}


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
