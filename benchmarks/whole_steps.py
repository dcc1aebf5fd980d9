"""Whole training steps with each method, as a ratio to the plain step: what a user pays.

A step is forward, backward and SGD. Three networks: a ResNet-18 with a 3×3 stem on two threads, where large products
dominate; the digits network of the built-in study on one thread, where the number of operations decides; a
transformer of two layers. Each is measured eager and compiled by ``torch.compile``: forward
and backward, not what comes after them. "usual" is what a user would write with autograd in ten lines,
"torch" is torch's own form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gonio
from benchmarks import usual
from benchmarks.harness import Candidate, Operation, Row
from benchmarks.networks import ResNet18
from benchmarks.usual import Prepare, Prepared
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio import regularizers as R

TITLE = "A whole training step with each method"
FLOOR = "the plain step: forward, backward and SGD"
PEER = "usual"
CONTROL = "no method"  # the plain step in every column: what a difference must exceed to be one


@dataclass(frozen=True)
class Network:
    """A model and its batch."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Tensor]
    where: type[nn.Module]  # the layers that a method acts on
    threads: int
    compiled: bool = False


@dataclass(frozen=True)
class Method:
    """One line of the table. `torch` is None where torch has no form of its own."""

    name: str
    goals: tuple[float, float] | None  # of the ResNet-18 and of the digits network
    ours: Prepare
    usual: Prepare
    torch: Prepare | None = None
    needs: tuple[type[nn.Module], ...] = ()  # the network has layers of these types, or the row is left out


def networks(*, quick: bool) -> tuple[Network, ...]:
    """`quick` takes small ones, and leaves out the ResNet-18, whose 20 convolutions take a minute at any width."""
    batch, channels = (2, 16) if quick else (32, 256)

    def images(draw: torch.Generator) -> Tensor:
        return torch.randn(batch, 3, 32, 32, generator=draw)

    def digits(draw: torch.Generator) -> Tensor:
        return torch.randn(20, 1, 8, 8, generator=draw)

    def text(draw: torch.Generator) -> Tensor:
        return torch.randint(256, (batch // 2, 64), generator=draw)

    residual = Network("ResNet-18", lambda: ResNet18(64, small_images=True), images, nn.Conv2d, 2)
    return (
        *(() if quick else (residual,)),
        Network("digits network", gonio.models.digits_cnn, digits, nn.Conv2d, 1),
        Network("transformer", lambda: gonio.models.ByteTransformer(width=channels), text, nn.Linear, 2),
    )


def _penalised(regularizer: R.Regularizer, *, in_place: bool) -> Prepare:
    def prepare(model: nn.Module, where: type[nn.Module]) -> Prepared:
        penalty = gonio.Penalty(model, [(where, regularizer)])
        return Prepared(before_step=penalty.add_grads_) if in_place else Prepared(penalty)

    return prepare


def _decoupled(magnitude: gnn.magnitude.Magnitude) -> Prepare:
    def prepare(model: nn.Module, where: type[nn.Module]) -> Prepared:
        new, angular = gnn.DecoupledConv2d.from_conv, gnn.angular.Cosine()
        gonio.swap_(model, new, where=nn.Conv2d, magnitude=magnitude, angular=angular)
        return Prepared()

    return prepare


def _switchable(model: nn.Module, where: type[nn.Module]) -> Prepared:
    gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm, where=nn.BatchNorm2d)
    return Prepared()


def _parametrized(template: Callable[[], P.Parametrization]) -> Prepare:
    def prepare(model: nn.Module, where: type[nn.Module]) -> Prepared:
        gonio.parametrize_(model, template(), where=where)
        return Prepared()

    return prepare


def _torchs(register: Callable[[nn.Module], object]) -> Prepare:
    def prepare(model: nn.Module, where: type[nn.Module]) -> Prepared:
        for module in list(model.modules()):
            if isinstance(module, where):
                register(module)
        return Prepared()

    return prepare


_TORCH = torch.nn.utils.parametrizations
METHODS = (
    Method(
        "orthogonality, add_grads_",
        (1.15, 1.15),
        _penalised(R.Orthogonality(1e-4), in_place=True),
        usual.orthogonality,
    ),
    Method("SRIP, add_grads_", (1.05, 1.15), _penalised(R.SRIP(1e-4), in_place=True), usual.srip),
    Method(
        "self-orthogonality",
        (1.25, 1.5),
        _penalised(R.SelfOrthogonality(1e-4), in_place=False),
        usual.self_orthogonality(None),
    ),
    Method(
        "self-orthogonality, samples=512",
        (1.08, 1.4),
        _penalised(R.SelfOrthogonality(1e-4, samples=512), in_place=False),
        usual.self_orthogonality(512),
    ),
    Method(
        "scale shift, add_grads_",
        (1.03, 1.1),
        _penalised(R.ScaleShift(1e-4, direction_strength=1e-4, before_norm="keep"), in_place=True),
        usual.scale_shift,
    ),
    Method("switchable norm", (1.03, 1.5), _switchable, usual.switchable_norm, needs=(nn.BatchNorm2d,)),
    Method(
        "decoupled (tanh, cosine)",
        (1.12, 1.5),
        _decoupled(gnn.magnitude.Tanh()),
        usual.decoupled,
        needs=(nn.Conv2d,),
    ),
    Method(
        "decoupled (tanh, cosine), learned radii",
        None,
        _decoupled(gnn.magnitude.Tanh(learn_radius=True)),
        usual.learned_decoupled,
        needs=(nn.Conv2d,),
    ),
    Method("weight norm", (1.03, 1.08), _parametrized(P.WeightNorm), usual.weight_norm, _torchs(_TORCH.weight_norm)),
    Method(
        "spectral norm",
        (1.05, 1.2),
        _parametrized(P.SpectralNorm),
        usual.spectral_norm,
        _torchs(_TORCH.spectral_norm),
    ),
    Method("weight standardisation", (1.04, 1.1), _parametrized(P.WeightStandardization), usual.weight_standardization),
    Method("sphere", (1.04, 1.1), _parametrized(P.Sphere), usual.sphere),
    Method("orthogonal", (1.7, 1.5), _parametrized(P.Orthogonal), usual.orthogonal, _torchs(_TORCH.orthogonal)),
)


GOALS = {
    (network, method.name, "step"): f"{goal:.2f}"
    for method in METHODS
    if method.goals
    for network, goal in zip(("ResNet-18", "digits-network"), method.goals, strict=True)
}

# Penalties applied every n-th step with n-fold strength, and for outputs on a sample of positions.
CHEAP = (
    (32, R.Orthogonality(1e-4, every=32)),
    (8, R.SRIP(1e-4, every=8)),
    (8, R.ScaleShift(1e-4, direction_strength=1e-4, before_norm="keep", every=8)),
    (16, R.SelfOrthogonality(1e-4, every=16, samples=512)),
)


def step_of(network: Network, prepare: Prepare, *, steps: int = 1) -> Operation:
    """Training steps as an operation; it returns nothing, since parameters move from step to step."""
    torch.manual_seed(0)
    torch.set_num_threads(network.threads)
    model = network.build()
    prepared = prepare(model, network.where)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    draw = torch.Generator().manual_seed(1)
    inputs = network.inputs(draw)
    with torch.no_grad():
        labels = torch.randint(10, tuple(model(inputs).shape[:-1]), generator=draw)

    def forward(inputs: Tensor) -> Tensor:
        out: Tensor = model(inputs)
        return out

    # A code object of its own: torch looks for the compiled form among all that were made of a code object, so that
    # the candidates of a row would pass through each other's guards.
    forward.__code__ = forward.__code__.replace()
    call = torch.compile(forward) if network.compiled else forward

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(call(inputs).flatten(0, -2), labels.flatten())
        if prepared.penalty is not None:
            loss = loss + prepared.penalty()
        loss.backward()
        if prepared.before_step is not None:
            prepared.before_step()
        optimizer.step()

    def operation() -> Sequence[Tensor]:
        for _ in range(steps):
            step()
        return []

    return operation


def plain(model: nn.Module, where: type[nn.Module]) -> Prepared:
    return Prepared()


def rows(*, quick: bool) -> Iterator[Row]:
    all_networks = networks(quick=quick)
    compiled = () if quick else (replace(n, name=f"{n.name} compiled", compiled=True) for n in all_networks)
    for network in (*all_networks, *compiled):
        types = {type(module) for module in network.build().modules()}
        for method in (*METHODS, Method(CONTROL, None, plain, plain)):
            if method.needs and not types & set(method.needs):
                continue
            # Torch's orthogonal weights compile for minutes on the larger networks, and then take 5 to 50 plain steps.
            too_long = network.compiled and network.threads > 1 and method.name == "orthogonal"
            ways = {"gonio": method.ours, "usual": method.usual, "torch": None if too_long else method.torch}
            candidates = [
                Candidate(name, lambda n=network, prepare=prepare: step_of(n, prepare), compiled=network.compiled)
                for name, prepare in ways.items()
                if prepare is not None
            ]
            floor = Candidate("plain step", lambda n=network: step_of(n, plain), compiled=network.compiled)
            yield Row(method.name, "step", floor, tuple(candidates), network.name.replace(" ", "-"))
    for every, regularizer in CHEAP:
        steps = 2 if quick else every
        network = networks(quick=quick)[0]
        in_place = not isinstance(regularizer, R.OutputRegularizer)
        samples = "" if in_place else f", samples={regularizer.samples}"
        ours = _penalised(regularizer, in_place=in_place)
        yield Row(
            f"{type(regularizer).__name__}, every={every}{samples}",
            f"{every} steps",
            Candidate("plain step", lambda n=network, k=steps: step_of(n, plain, steps=k)),
            (Candidate("gonio", lambda n=network, k=steps, prepare=ours: step_of(n, prepare, steps=k)),),
            "every",
        )
