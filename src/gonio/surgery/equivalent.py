"""`equivalent`: how far the outputs of two models differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from gonio.editing.wrapping import run_eagerly
from gonio.errors import InvalidArgumentError
from gonio.seeding import generator

_SIZES = (8, 16, 32, 64, 96, 128, 224, 256, 299, 384)


@dataclass(frozen=True)
class Deviation:
    """The largest difference between two models' outputs: max |a − b|, and this over max |a| (0 if both are 0)."""

    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"largest deviation {self.absolute:.3g} ({self.relative:.3g} relative)"


def equivalent(model_a: nn.Module, model_b: nn.Module, *, example: Any = None) -> Deviation:
    r"""Largest absolute and relative deviation of two models' outputs on the same input.

    .. math::
        \max_i |a_i - b_i| \quad\text{and}\quad \max_i |a_i - b_i| \,/\, \max_i |a_i|

    Both models run in evaluation mode without gradients and get their modes back.

    `example` is an input tensor, a tuple of arguments or a dict of keyword arguments; None for one that
    :func:`gonio.surgery.generated_example` makes for `model_a`, the reference.

    Raises: InvalidArgumentError if the outputs differ in structure or shape, or are not finite, or if no example is
        given and none can be made.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> gonio.equivalent(model, model, example=torch.ones(1, 2))
        Deviation(absolute=0.0, relative=0.0)
    """
    if example is None:
        example = generated_example(model_a)
    return deviation(outputs(model_a, example), outputs(model_b, example))


def generated_example(model: nn.Module, *, batch: int = 2, seed: int = 0) -> Any:
    r"""An input that the model takes: standard normal numbers, or indices for an embedding.

    The number of channels or features is that of the first layer with weights. Sizes are tried from small to large,
    after the `input_size` that a timm model declares and before the `dummy_inputs` of transformers. The returned
    input has run through the model in evaluation mode once.

    Raises: InvalidArgumentError if no tried input runs; a model of several inputs needs your own example.

    Example:
        >>> gonio.surgery.generated_example(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())).shape
        torch.Size([2, 3, 8, 8])
    """
    reason = "it has no layer that tells its input size"
    for example in _examples(model, batch, seed):
        try:
            outputs(model, example)
        except Exception as error:  # a model can raise anything at a size that it does not take
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        return example
    raise InvalidArgumentError("no example input was found for the model", reason, "Pass example= yourself.")


def _examples(model: nn.Module, batch: int, seed: int) -> Iterator[Any]:
    random = generator(seed, "example")
    reference = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    for shape, indices in _candidates(model, batch):
        if indices:
            yield torch.randint(indices, shape, generator=random).to(reference.device)
        else:
            yield torch.randn(shape, generator=random).to(reference)
    declared = getattr(model, "dummy_inputs", None)
    if isinstance(declared, Mapping):
        yield {name: value.to(reference.device) for name, value in declared.items() if isinstance(value, Tensor)}


def _candidates(model: nn.Module, batch: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """(shape, number of indices or 0) in the order in which they are tried."""
    declared = getattr(model, "pretrained_cfg", None) or {}
    for key in ("test_input_size", "input_size"):
        if isinstance(declared, Mapping) and declared.get(key):
            yield (batch, *declared[key]), 0
    kinds = (nn.modules.conv._ConvNd, nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.MultiheadAttention)
    match next((module for module in model.modules() if isinstance(module, kinds)), None):
        case nn.modules.conv._ConvNd() as conv:
            dims = conv.weight.dim() - 2
            yield from (((batch, conv.in_channels, *[size] * dims), 0) for size in _SIZES)
        case nn.Linear() as linear:
            yield from (((batch, *rest, linear.in_features), 0) for rest in ((), (8,)))
        case nn.Embedding() | nn.EmbeddingBag() as table:
            yield (batch, 8), table.num_embeddings
        case nn.RNNBase() as recurrent:
            yield (batch, 8, recurrent.input_size), 0
        case nn.MultiheadAttention() as attention:
            yield (batch, 8, attention.embed_dim), 0


def outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """The floating-point outputs of a model in evaluation mode, flattened in order."""
    with evaluating(model), torch.no_grad():
        leaves, _ = tree_flatten(call(model, example))
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def deviation(a: list[Tensor], b: list[Tensor]) -> Deviation:
    """The largest difference between two lists of outputs."""
    shapes = [tuple(x.shape) for x in a], [tuple(x.shape) for x in b]
    if shapes[0] != shapes[1] or not a:
        raise InvalidArgumentError(
            "equivalent() compares two models with outputs of the same shapes",
            f"{shapes[0]} and {shapes[1]}",
            "Give an example that both models take.",
        )
    if not all(torch.isfinite(x).all() for x in (*a, *b)):
        raise InvalidArgumentError(
            "equivalent() compares finite outputs", "NaN or infinity", "Check weights and input."
        )
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=True) if x.numel()]
    absolute = max((float((x - y).abs().max()) for x, y in pairs), default=0.0)
    scale = max((float(x.abs().max()) for x, _ in pairs), default=0.0)
    return Deviation(absolute, absolute / scale if scale > 0 else absolute)


def call(model: nn.Module, example: Any) -> Any:
    """Call a model on a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(example, Mapping):
        return model(**example)
    if isinstance(example, tuple):
        return model(*example)
    return model(example)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block, with compiled parts run eagerly; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()  # may raise half-way, in a model that is its own child
        with run_eagerly(model):
            yield
    finally:
        for module, training in modes:
            module.training = training
