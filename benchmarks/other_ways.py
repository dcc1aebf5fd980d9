"""Other ways to compute what is slower than its goal, as whole training steps: why a row of `whole_steps` is as it is.

Every candidate does the work of "gonio" beside it; constants may differ. "plain" is the plain form of the same formula,
which compilers get; "usual" and "torch" are those of `whole_steps`; "alone" is a part of the work that no way avoids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gonio
from benchmarks import usual, whole_steps
from benchmarks.harness import Candidate, Operation, Row
from benchmarks.results import path_of
from benchmarks.usual import STRENGTH, Prepare, Prepared, by_filter, in_the_place_of, outputs_of, replaced, unit
from benchmarks.whole_steps import METHODS, Network, networks, plain, step_of
from gonio import nn as gnn

TITLE = "Other ways to compute what is slower than its goal"
FLOOR = whole_steps.FLOOR
RESULT = path_of("other_ways")

Way = Callable[[Network], Operation]


def _never(*_: object) -> bool:
    return False


def _step(prepare: Prepare) -> Way:
    return lambda network: step_of(network, prepare)


def _patched(method: str, **names: Any) -> Way:
    """gonio's own step with other values of some of its names, as gonio_nn_kernels__LARGE."""

    def make(network: Network) -> Operation:
        run = step_of(network, OURS[method])

        def operation() -> Sequence[Tensor]:
            with ExitStack() as stack:
                for name, value in names.items():
                    stack.enter_context(patch(name.replace("__", "."), value))
                return run()

        return operation

    return make


# --- orthogonality ------------------------------------------------------------------------------------


def _batches_of_one_shape(model: nn.Module, where: type[nn.Module]) -> Prepared:
    """Closed form; weights of one shape are stacked and multiplied as a batch."""
    shapes: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, where):
            shapes[tuple(module.weight.shape)].append(module.weight)

    @torch.no_grad()
    def add() -> None:
        for weights in shapes.values():
            w = torch.stack([weight.flatten(1) for weight in weights])
            if w.shape[1] <= w.shape[2]:
                by = (w @ w.mT - torch.eye(w.shape[1])) @ w
            else:
                by = w @ (w.mT @ w - torch.eye(w.shape[2]))
            grads = [weight.grad for weight in weights if weight.grad is not None]
            torch._foreach_add_(grads, [g.view_as(x) for g, x in zip(by, weights, strict=True)], alpha=4 * STRENGTH)

    return Prepared(before_step=add)


def _two_products_alone(model: nn.Module, where: type[nn.Module]) -> Prepared:
    """The Gram matrix of the smaller side and its product with the weight, into buffers, and nothing else."""
    work = []
    for weight in (module.weight for module in model.modules() if isinstance(module, where)):
        rows = weight.detach().flatten(1)
        a = rows if len(rows) <= rows.shape[1] else rows.T
        work.append((a, a.new_empty(len(a), len(a)), torch.empty_like(a)))

    def multiply() -> None:
        for a, gram, product in work:
            torch.mm(a, a.T, out=gram)
            torch.mm(gram, a, out=product)

    return Prepared(before_step=multiply)


# --- SRIP and scale shift -------------------------------------------------------------------------------


def _srip(image_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Prepare:
    """Closed form of |A Aᵀ v − v| with v the last direction; `image_of` gives Aᵀ v and A Aᵀ v."""

    def prepare(model: nn.Module, where: type[nn.Module]) -> Prepared:
        weights = [module.weight for module in model.modules() if isinstance(module, where)]
        vectors = [F.normalize(torch.randn(min(len(w), w[0].numel())), dim=0) for w in weights]

        @torch.no_grad()
        def add() -> None:
            for weight, vector in zip(weights, vectors, strict=True):
                rows = weight.flatten(1)
                a = rows if len(rows) <= rows.shape[1] else rows.T
                inner, image = image_of(a, vector)
                image = image - vector
                unit = image / torch.linalg.vector_norm(image)
                by = torch.outer(unit, inner).addr_(vector, a.T @ unit)
                weight.grad.add_((by if a is rows else by.T).view_as(weight), alpha=STRENGTH)
                vector.copy_(unit)

        return Prepared(before_step=add)

    return prepare


def _scale_one_by_one(model: nn.Module, where: type[nn.Module]) -> Prepared:
    """Closed form, one weight after the other."""
    weights = [module.weight for module in model.modules() if isinstance(module, where)]

    @torch.no_grad()
    def add() -> None:
        for weight in weights:
            norm = torch.linalg.vector_norm(weight)
            on_weight = (1 - weight.abs().sum() / norm) / norm.square()
            weight.grad.add_(weight * on_weight + weight.sign() / norm, alpha=STRENGTH)

    return Prepared(before_step=add)


def _scale_foreach(model: nn.Module, where: type[nn.Module]) -> Prepared:
    """Closed form by torch's operations on lists of tensors."""
    weights = [module.weight for module in model.modules() if isinstance(module, where)]

    @torch.no_grad()
    def add() -> None:
        norms, sums = torch.stack(torch._foreach_norm(weights)), torch.stack(torch._foreach_norm(weights, 1))
        by = torch._foreach_mul(weights, ((1 - sums / norms) / norms.square()).unbind())
        torch._foreach_add_(by, torch._foreach_mul(torch._foreach_sign(weights), norms.reciprocal().unbind()))
        torch._foreach_add_([weight.grad for weight in weights], by, alpha=STRENGTH)

    return Prepared(before_step=add)


# --- self-orthogonality -------------------------------------------------------------------------------


class _Signs(torch.autograd.Function):
    """(ΣC)² + ΣC² of one layer's outputs (k, samples), everything but two products on k × k matrices."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        t = torch.tanh(z - z.mean(1, keepdim=True))
        gram = t @ t.T
        scale = gram.diagonal().rsqrt()
        cosines = gram * scale * scale[:, None]
        cosines.fill_diagonal_(0)
        total = cosines.sum()
        by = cosines + total
        by.fill_diagonal_(0)
        by.diagonal().copy_(-(by * cosines).sum(1))
        ctx.save_for_backward(t, by * scale * scale[:, None] * 4)
        return total.square() + cosines.square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        t, by = ctx.saved_tensors
        back = torch.ops.aten.tanh_backward((by * grads[0]) @ t, t)
        return back - back.mean(1, keepdim=True)


def _one_function_per_layer(samples: int | None) -> Prepare:
    def prepare(model: nn.Module, where: type[nn.Module]) -> Prepared:
        outputs = outputs_of(model, where)

        def penalty() -> Tensor:
            total = torch.zeros(())
            for output in outputs:
                z = output.transpose(0, 1).flatten(1)
                if samples is not None and z.shape[1] > samples:
                    z = z[:, torch.randint(z.shape[1], (samples,))]
                total = total + _Signs.apply(z)
            outputs.clear()
            return STRENGTH * total

        return Prepared(penalty)

    return prepare


# --- norms and operators ------------------------------------------------------------------------------


class NativeMixture(usual.SwitchableNorm):
    """All statistics from torch's own two reductions, all mixing in small arrays, one pass over the output."""

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, (2, 3), correction=0)
        layer = mean.mean(1, keepdim=True)
        of_layer = (var + mean.square()).mean(1, keepdim=True) - layer.square()
        batch = mean.mean(0, keepdim=True)
        of_batch = (var + mean.square()).mean(0, keepdim=True) - batch.square()
        a, b = self.mean_logits.softmax(0), self.var_logits.softmax(0)
        slope = self.weight * (b[0] * var + b[1] * of_layer + b[2] * of_batch + 1e-5).rsqrt()
        shift = self.bias - slope * (a[0] * mean + a[1] * layer + a[2] * batch)
        return torch.addcmul(shift[..., None, None], x, slope[..., None, None])


class _TanhCosine(torch.autograd.Function):
    """tanh(‖x‖) · cos θ of unit filters with its gradient: one convolution more than the product, for the norms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: Tensor, conv: nn.Conv2d) -> Tensor:
        ctx.options = (conv.stride, conv.padding, conv.dilation, False, (0, 0), 1)
        ctx.ones = torch.ones(1, 1, *conv.kernel_size)
        square = torch.convolution((x * x).sum(1, keepdim=True), ctx.ones, None, *ctx.options)
        norm = square.clamp_min(1e-18).sqrt()
        slope = norm.tanh() / norm
        out = torch.convolution(x, unit, None, *ctx.options)
        ctx.save_for_backward(x, unit, norm, slope, out)
        return out * slope

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, unit, norm, slope, out = ctx.saved_tensors
        by_slope = (grads[0] * out).sum(1, keepdim=True)
        by_square = by_slope * (1 - norm.tanh().square() - slope) / (2 * norm.square())
        back = torch.ops.aten.convolution_backward
        by_x, by_unit, _ = back(grads[0] * slope, x, unit, None, *ctx.options, (ctx.needs_input_grad[0], True, False))
        if by_x is not None:
            wanted = (True, False, False)
            by_energy, _, _ = back(by_square, x[:, :1], ctx.ones, None, *ctx.options, wanted)
            by_x = torch.addcmul(by_x, x, by_energy, value=2)
        return by_x, by_unit, None


class TanhCosine(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return _TanhCosine.apply(x, unit(self.weight), self)


def _absolute(model: nn.Module, where: type[nn.Module]) -> Prepared:
    """The function of the usual form: no mean of input norms is taken or tracked."""
    magnitude = gnn.magnitude.Tanh(radius_in="absolute")
    angular = gnn.angular.Cosine()
    gonio.swap_(model, gnn.DecoupledConv2d.from_conv, where=nn.Conv2d, magnitude=magnitude, angular=angular)
    return Prepared()


# --- parametrizations ---------------------------------------------------------------------------------


def _computed(weight: Callable[[Any], Tensor], extend: Callable[[Any], object] | None = None) -> Prepare:
    """Each convolution's weight computed in its forward, without a mechanism around it."""

    def prepare(model: nn.Module, where: type[nn.Module]) -> Prepared:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                if extend is not None:
                    extend(module)

                def forward(x: Tensor, module: nn.Conv2d = module) -> Tensor:
                    return F.conv2d(x, weight(module), module.bias, module.stride, module.padding)

                module.forward = forward  # type: ignore[method-assign]
        return Prepared()

    return prepare


def _with_gain(module: Any) -> None:
    module.gain = nn.Parameter(module.weight.detach().flatten(1).norm(dim=1))


def _with_spectral_norm(module: Any) -> None:
    module.divided = usual.SpectralNorm(module.weight)


class _Rescaled(torch.autograd.Function):
    """Torch's kernel of weight norm in a function of its own, with gains of one dimension."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, gain: Tensor) -> Tensor:
        each = by_filter(gain, raw)
        weight, norms = torch._weight_norm_interface(raw, each, 0)
        if not norms.min().item() > 0:
            raise ValueError("a zero filter")
        ctx.save_for_backward(raw, each, norms)
        return weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        by_raw, by_gain = torch.ops.aten._weight_norm_interface_backward(grads[0], *ctx.saved_tensors, 0)
        return by_raw, by_gain.view(-1)


def _by_batch_norm(module: nn.Conv2d) -> Tensor:
    """As timm does it: filters as the channels of a batch of one."""
    weight = module.weight
    return F.batch_norm(weight.view(1, len(weight), -1), None, None, training=True, eps=1e-10).view_as(weight)


def _newton_schulz(steps: int) -> Callable[[nn.Conv2d], Tensor]:
    """Iterations from the weight over its Frobenius norm, differentiated by autograd."""

    def weight(module: nn.Conv2d) -> Tensor:
        rows = module.weight.flatten(1)
        wide = len(rows) <= rows.shape[1]
        q = rows if wide else rows.T
        q = q / q.norm() * len(q) ** 0.5 * 0.5
        for _ in range(steps):
            q = 1.5 * q - 0.5 * (q @ q.T) @ q
        return (q if wide else q.T).reshape(module.weight.shape)

    return weight


OURS: dict[str, Prepare] = {method.name: method.ours for method in METHODS}
USUAL = {method.name: _step(method.usual) for method in METHODS}
TORCHS = {method.name: _step(method.torch) for method in METHODS if method.torch is not None}

_NO_KERNEL = {"gonio__parametrizations__filters__applies_to": _never}
_NO_CLOSED_FORM = {"gonio__regularizers__base__ordinary_eager": _never}
_PLAIN_SIGNS = {"gonio__regularizers__self_orthogonality__ordinary_eager": _never}

# By network and method.
WAYS: dict[tuple[str, str], dict[str, Way]] = {}
for _network in ("ResNet-18", "digits network"):
    WAYS |= {
        (_network, "orthogonality, add_grads_"): {
            "usual": USUAL["orthogonality, add_grads_"],
            "whole Gram matrices": _patched("orthogonality, add_grads_", gonio__geometry__norms__HALVED_FROM=10**9),
            "a batch per shape": _step(_batches_of_one_shape),
            "the two products alone": _step(_two_products_alone),
        },
        (_network, "orthogonal"): {
            "usual": USUAL["orthogonal"],
            "torch": TORCHS["orthogonal"],
            "always corrected": _patched("orthogonal", gonio__parametrizations__orthogonal___well_conditioned=_never),
            "Newton–Schulz, 8 steps": _step(_computed(_newton_schulz(8))),
        },
        (_network, "spectral norm"): {
            "usual": USUAL["spectral norm"],
            "torch": TORCHS["spectral norm"],
            "in the layers' forward": _step(_computed(lambda m: m.divided(m.weight), _with_spectral_norm)),
            "plain": _patched("spectral norm", gonio__parametrizations__spectral_norm__ordinary_eager=_never),
        },
    }
    for _samples, _name in ((None, "self-orthogonality"), (512, "self-orthogonality, samples=512")):
        WAYS[_network, _name] = {
            "usual": USUAL[_name],
            "plain": _patched(_name, **_PLAIN_SIGNS),
            "one function per layer": _step(_one_function_per_layer(_samples)),
        }
WAYS |= {
    ("digits network", "SRIP, add_grads_"): {
        "usual": USUAL["SRIP, add_grads_"],
        "plain": _patched("SRIP, add_grads_", **_NO_CLOSED_FORM),
        "one by one": _step(_srip(lambda a, v: (inner := a.T @ v, a @ inner))),
        "by the Gram matrix": _step(_srip(lambda a, v: (a.T @ v, (a @ a.T) @ v))),
    },
    ("digits network", "scale shift, add_grads_"): {
        "usual": USUAL["scale shift, add_grads_"],
        "plain": _patched("scale shift, add_grads_", **_NO_CLOSED_FORM),
        "one by one": _step(_scale_one_by_one),
        "lists of tensors": _step(_scale_foreach),
    },
    ("digits network", "switchable norm"): {
        "usual": USUAL["switchable norm"],
        "plain": _patched("switchable norm", gonio__nn__switchable_norm__ordinary_eager=_never),
        "autograd of var_mean": _step(replaced(nn.BatchNorm2d, NativeMixture)),
    },
    ("digits network", "decoupled (tanh, cosine)"): {
        "usual": USUAL["decoupled (tanh, cosine)"],
        "absolute radius": _step(_absolute),
        "second forms on small maps too": _patched("decoupled (tanh, cosine)", gonio__nn__kernels__LARGE=0),
        "one function per convolution": _step(replaced(nn.Conv2d, in_the_place_of(TanhCosine))),
    },
    ("digits network", "weight norm"): {
        "usual": USUAL["weight norm"],
        "torch": TORCHS["weight norm"],
        "plain": _patched("weight norm", **_NO_KERNEL),
        "a function around the kernel": _step(_computed(lambda m: _Rescaled.apply(m.weight, m.gain), _with_gain)),
    },
    ("digits network", "sphere"): {
        "usual": USUAL["sphere"],
        "plain": _patched("sphere", **_NO_KERNEL),
        "a function around the kernel": _step(
            _computed(lambda m: _Rescaled.apply(m.weight, m.weight.new_ones(len(m.weight))))
        ),
    },
    ("digits network", "weight standardisation"): {
        "usual": USUAL["weight standardisation"],
        "plain": _patched(
            "weight standardisation",
            **_NO_KERNEL,
            gonio__parametrizations__weight_standardization__applies_to=_never,
        ),
        "as a batch norm": _step(_computed(_by_batch_norm)),
    },
}


def rows(*, quick: bool) -> Iterator[Row]:
    made = {network.name: network for network in networks(quick=quick)}
    for (name, method), ways in WAYS.items():
        network = made.get(name)
        if network is None:
            continue
        others = {"gonio": _step(OURS[method]), **ways}
        candidates = [Candidate(way, lambda n=network, make=make: make(n)) for way, make in others.items()]
        floor = Candidate("plain step", lambda n=network: step_of(n, plain))
        yield Row(method, "step", floor, tuple(candidates), name.replace(" ", "-"))


def table(found: dict[str, Any]) -> str:
    """A line per method and network: its goal, gonio's step and the other ways."""
    lines = ["| | goal | gonio | other ways |", "|---|--:|--:|---|"]
    for row in found["rows"]:
        ours, *others = (f"{c['wall']['median']:.2f}" for c in row["candidates"])
        names = [c["name"] for c in row["candidates"][1:]]
        ways = " · ".join(f"{name} {ratio}" for name, ratio in zip(names, others, strict=True))
        goal = whole_steps.GOALS[row["table"], row["case"], "step"]
        lines.append(f"| {row['table'].replace('-n', ' n')}: {row['case']} | {goal} | {ours} | {ways} |")
    return "\n".join(lines)
