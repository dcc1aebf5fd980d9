"""The sum over layers: values, gradients, steps, resuming."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, func, nn
from torch.nn.utils import parametrizations

import gonio
from catalog import seeded
from gonio import Penalty
from gonio import regularizers as R
from gonio.errors import GonioWarning, InvalidArgumentError
from gonio.geometry import layout_of, matrix_view
from gonio.penalty.penalty import UNCALLED
from gonio.seeding import generator
from laws.support import reloaded
from tolerances import close, exact

DOUBLE = torch.float64
WEIGHT_RULES = [
    (None, R.Orthogonality(0.1)),
    (nn.Conv2d, R.ConvOrthogonality(0.2)),
    ("4", R.ScaleShift(0.05, direction_strength=0.01)),
    ("4", R.HypersphericalEnergy(0.3)),
    (nn.Conv2d, R.SRIP(0.1)),
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 5)
    ).double()


def batch(n: int = 6) -> Tensor:
    return seeded(n, 3, 8, 8, dtype=DOUBLE)


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_it_is_the_sum_of_its_terms() -> None:
    model = network()
    rules = [(None, R.Orthogonality(0.5)), ("2", R.SRIP(0.1, iterations=3))]
    expected = sum(0.5 * R.Orthogonality(1.0).value(m.weight, layout_of(m)) for m in (model[0], model[2], model[4]))
    expected = expected + 0.1 * R.SRIP(1.0, iterations=3).value(model[2].weight, layout_of(model[2]))
    penalty = Penalty(model, rules)
    total = penalty()
    torch.testing.assert_close(total, expected, **exact(DOUBLE))
    assert sum(penalty.values().values()) == pytest.approx(float(total.detach()), rel=1e-12)
    total.backward()
    assert all(m.weight.grad is not None for m in (model[0], model[2], model[4]))


def test_values_name_the_terms_of_a_term() -> None:
    model = network()
    penalty = Penalty(model, [("4", R.ScaleShift(0.1, direction_strength=0.2)), ("0", R.SelfOrthogonality(1.0))])
    model(batch())
    total = penalty()
    assert list(penalty.values()) == [
        "4.weight/ScaleShift/scale",
        "4.weight/ScaleShift/direction",
        "0.output/SelfOrthogonality/mean",
        "0.output/SelfOrthogonality/spread",
    ]
    assert sum(penalty.values().values()) == pytest.approx(float(total.detach()), rel=1e-12)


def test_outputs_are_read_without_their_bias_and_with_their_groups() -> None:
    model, x = network(), batch()
    for som in (R.SelfOrthogonality(1.0), R.SelfOrthogonality.paper(1.0)):
        with Penalty(model, [("2", som)]) as penalty:
            model(x)
            hidden = model[1](model[0](x))
            plain = nn.functional.conv2d(hidden, model[2].weight, groups=2)
            torch.testing.assert_close(penalty(), som.value(plain, groups=2), **close(DOUBLE))


@pytest.mark.parametrize(
    ("layer", "shape", "flat"),
    [
        *((nn.Linear(4, 6), shape, lambda y: y.reshape(-1, 6)) for shape in ((7, 4), (2, 3, 5, 4), (4,))),
        (nn.Conv2d(2, 6, 3, bias=False), (2, 7, 7), lambda y: y.unsqueeze(0)),
    ],
)
def test_channels_of_any_layer(layer: nn.Module, shape: tuple[int, ...], flat: Callable[[Tensor], Tensor]) -> None:
    """The last dimension of a linear layer; a convolution may lack the batch."""
    layer = layer.double()
    penalty = Penalty(layer, [(None, R.SelfOrthogonality(1.0))])
    expected = R.SelfOrthogonality(1.0).value(flat(layer(seeded(*shape, dtype=DOUBLE))))
    torch.testing.assert_close(penalty(), expected, **close(DOUBLE))


@pytest.mark.parametrize("parametrization", ["torch", "gonio", "none"])
def test_the_effective_weight_is_what_is_read(parametrization: str) -> None:
    layer = nn.Linear(4, 3).double()
    if parametrization == "torch":
        parametrizations.weight_norm(layer)
    if parametrization == "gonio":
        gonio.parametrize_(layer, gonio.parametrizations.WeightNorm())
    penalty = Penalty(layer, [(None, R.Orthogonality(1.0))])
    total = penalty()
    torch.testing.assert_close(total, R.Orthogonality(1.0).value(layer.weight))
    total.backward()
    assert all(p.grad is not None for name, p in layer.named_parameters() if name != "bias")


# --- add_grads_ -----------------------------------------------------------------------------------


def with_weight_norm() -> nn.Sequential:
    model = network()
    parametrizations.weight_norm(model[4])
    return model


@pytest.mark.parametrize("make", [network, with_weight_norm])
@pytest.mark.parametrize("before", [False, True], ids=["grad None", "grad there"])
def test_add_grads_equals_backward(make: Callable[[], nn.Sequential], before: bool) -> None:
    through, direct = make(), make()
    penalties = [Penalty(model, WEIGHT_RULES) for model in (through, direct)]
    if before:
        for model in (through, direct):
            model(batch()).square().mean().backward()
    for _ in range(2):  # the second step starts from the states that the first left
        penalties[0]().backward()
        penalties[1].add_grads_()
    for a, b in zip(gradients(direct), gradients(through), strict=True):
        torch.testing.assert_close(a, b, **close(DOUBLE))
    assert penalties[0].values() == pytest.approx(penalties[1].values())


def test_add_grads_leaves_frozen_weights_alone() -> None:
    model = network()
    model[0].requires_grad_(False)
    with torch.no_grad():  # which does not matter
        Penalty(model, [(None, R.L2(1.0))]).add_grads_()
    assert model[0].weight.grad is None
    assert model[4].weight.grad is not None


class Objective(nn.Module):
    """A loss and its penalty as one function of the parameters, for `torch.func`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.penalty = model, Penalty(model, [(None, R.HypersphericalEnergy(0.3))])

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean() + self.penalty()


@pytest.mark.parametrize("transform", ["call", "jvp", "vmap", "grad"])
def test_functions_of_the_parameters_contain_the_penalty(transform: str) -> None:
    """Tensors in the place of Parameters are not frozen, whether or not they require a gradient."""
    objective = Objective(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double())
    x, along = seeded(5, 4, dtype=DOUBLE), seeded(6, 4, seed=3, dtype=DOUBLE)
    values = {name: p.detach().clone() for name, p in objective.named_parameters()}
    of = functools.partial(func.functional_call, objective, args=(x,))

    def of_weight(weight: Tensor) -> Tensor:
        return of({**values, "model.0.weight": weight})

    weight = values["model.0.weight"]
    leaf = weight.clone().requires_grad_()
    expected = objective(x)
    (gradient,) = torch.autograd.grad(of_weight(leaf), leaf)
    if transform == "call":
        found = of(values)
    elif transform == "vmap":
        found = func.vmap(of_weight)(weight.expand(2, -1, -1))[1]
    elif transform == "grad":
        found, expected = func.grad(of_weight)(weight), gradient
    else:
        found, expected = func.jvp(of_weight, (weight,), (along,))[1], (gradient * along).sum()
    torch.testing.assert_close(found, expected.detach(), **close(DOUBLE))


def test_add_grads_cannot_reach_through_outputs() -> None:
    penalty = Penalty(network(), [(None, R.L2(1.0)), ("0", R.SelfOrthogonality(1.0))])
    with pytest.raises(InvalidArgumentError, match=r"rules that read outputs: 0\.output/SelfOrthogonality"):
        penalty.add_grads_()


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "factors"),
    [
        (R.L2(1.0, every=3), [3, 0, 0, 3, 0, 0]),
        (R.L2(1.0, schedule=R.Warmup(4)), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    ],
)
def test_the_strength_follows_the_steps(rule: R.L2, factors: list[float]) -> None:
    model = network()
    penalty = Penalty(model, [("4", rule)])
    once = float(R.L2(1.0)(model[4].weight).detach())
    assert [float(penalty().detach()) / once for _ in range(6)] == pytest.approx(factors)
    assert penalty.step == 6
    assert len(penalty.values()) == (factors[5] > 0)


def test_every_forgets_the_outputs_between() -> None:
    model, x = network(), batch()
    penalty = Penalty(model, [("4", R.SelfOrthogonality(1.0, every=2))])
    model(x), penalty()
    model(2 * x), penalty()
    model(3 * x)
    expected = 2 * R.SelfOrthogonality(1.0).value(model(3 * x))
    penalty._terms[0]._hook.forget()  # type: ignore[attr-defined]
    model(3 * x)
    torch.testing.assert_close(penalty(), expected, **close(DOUBLE))


@pytest.mark.parametrize("way", ["the loss divided", "accumulate"])
def test_accumulated_micro_batches_equal_one_batch(way: str) -> None:
    """E8: 8 × 1 equals 1 × 8, for weights exactly."""
    x, whole, split = batch(8), network(), network()
    rules = [(None, R.Orthogonality(0.1)), ("4", R.L2(0.3, every=2))]
    (whole(x).square().mean() + Penalty(whole, rules)()).backward()
    penalty = Penalty(split, rules, accumulate=8 if way == "accumulate" else 1)
    if way == "the loss divided":
        rules = [(None, R.Orthogonality(0.1)), ("4", R.L2(0.6))]  # `every` counts calls here
        penalty = Penalty(split, rules)
    for row in x:
        loss = split(row.unsqueeze(0)).square().mean()
        ((loss + penalty()) / 8 if way == "the loss divided" else loss / 8 + penalty()).backward()
    for a, b in zip(gradients(split), gradients(whole), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-12)
    if way == "accumulate":
        assert penalty.step == 1


def test_accumulate_must_be_positive() -> None:
    with pytest.raises(InvalidArgumentError, match=r"accumulate=…\) needs at least 1 call per step; found 0"):
        Penalty(network(), [(None, R.L2(1.0))], accumulate=0)


@pytest.mark.parametrize("way", ["in the loss", "added"])
def test_under_a_gradient_scaler(way: str) -> None:
    rules = [(None, R.Orthogonality(0.1))]
    plain, scaled = network().float(), network().float()
    (plain(batch().float()).square().mean() + Penalty(plain, rules)()).backward()
    penalty = Penalty(scaled, rules)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = scaled(batch().float()).square().mean()
    scaler.scale(loss + penalty() if way == "in the loss" else loss).backward()
    scaler.unscale_(optimizer)
    if way == "added":
        penalty.add_grads_()
    for a, b in zip(gradients(scaled), gradients(plain), strict=True):
        torch.testing.assert_close(a, b, **close(torch.float32))


def test_models_without_storage_can_be_bound() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    penalty = Penalty(model, [(None, R.ScaleShift(1e-3)), (None, R.Orthogonality(1e-3))])
    assert penalty().is_meta
    model.to_empty(device="cpu")
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    assert penalty().isfinite()


# --- resuming -------------------------------------------------------------------------------------


def steps(model: nn.Sequential, penalty: Penalty, count: int, start: int = 0) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(start, start + count):
        optimizer.zero_grad()
        (model(seeded(6, 3, 8, 8, seed=step, dtype=DOUBLE)).square().mean() + penalty()).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_resuming_is_not_seen() -> None:
    rules = [
        (None, R.SRIP(0.1)),
        ("0", R.SelfOrthogonality(0.1, samples=50)),
        (None, R.L2(0.1, every=3, schedule=R.Warmup(9))),
    ]
    model = network()
    expected = steps(model, Penalty(model, rules), 8)
    first = network()
    penalty = Penalty(first, rules)
    steps(first, penalty, 4)
    state = reloaded({"model": first.state_dict(), "penalty": penalty.state_dict()})
    second = network()
    second.load_state_dict(state["model"])
    resumed = Penalty(second, rules)
    resumed.load_state_dict(state["penalty"])
    for a, b in zip(steps(second, resumed, 4, start=4), expected, strict=True):
        assert torch.equal(a, b)


def test_samples_depend_on_the_seed_alone() -> None:
    def value(seed: int) -> float:
        model = network()
        penalty = Penalty(model, [("0", R.SelfOrthogonality(1.0, samples=20))], seed=seed)
        torch.manual_seed(seed + 100)
        model(batch())
        return float(penalty().detach())

    assert value(0) == value(0)
    assert value(0) != value(1)


@pytest.mark.parametrize("case", ["another regularizer", "another model", "fewer terms"])
def test_a_state_of_other_terms_is_refused_by_name(case: str) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    penalty = gonio.Penalty(layers, [(None, gonio.regularizers.SRIP(1e-3))])
    penalty()
    other = {
        "another regularizer": lambda: gonio.Penalty(layers, [(None, gonio.regularizers.L2(1e-3))]),
        "another model": lambda: gonio.Penalty(
            nn.ModuleDict({"a": layers[0]}), [(None, gonio.regularizers.SRIP(1e-3))]
        ),
        "fewer terms": lambda: gonio.Penalty(layers, [("0", gonio.regularizers.SRIP(1e-3))]),
    }[case]()
    with pytest.raises(InvalidArgumentError, match=r"takes the state of the same terms; found .*1\.weight/SRIP"):
        other.load_state_dict(penalty.state_dict())
    assert other.step == 0


# --- random probes in place of a batch ----------------------------------------------------------------


@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(3, 4, 2)], ids=str)
def test_probes_read_the_weight_and_not_the_inputs(layer: nn.Module) -> None:
    som = R.SelfOrthogonality(1.0, probes=512)
    image = isinstance(layer, nn.modules.conv._ConvNd)
    model = nn.Sequential(layer)
    shape = (2, layer.in_channels, 5, 5) if image else (3, 6)
    values = []
    for scale in (1.0, -7.0):  # other inputs, the same probes
        penalty = gonio.Penalty(model, [(type(layer), som)], seed=3)
        model(scale * torch.ones(shape))
        values.append(penalty())
        penalty.undo_()
    assert torch.equal(*(value.detach() for value in values))
    layout = layout_of(layer)
    rows = matrix_view(layer.weight.detach(), layout)
    label = "0.output/SelfOrthogonality"
    probes = torch.randn(512, rows.shape[-1], generator=generator(3, "penalty", label))
    expected = som.value((rows @ probes.T).flatten(0, 1).T, groups=layout.groups)
    assert float(values[0].detach()) == pytest.approx(float(expected), rel=1e-5)
    (gradient,) = torch.autograd.grad(values[0], layer.weight)
    assert gradient.abs().sum() > 0


def test_probes_and_samples_exclude_each_other() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"SelfOrthogonality\(\) needs probes from 2 to 1048576, without samples; found"
    ):
        R.SelfOrthogonality(1.0, probes=64, samples=8)


def _trained(penalty: Penalty, model: nn.Module, steps: int, *, call: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        (loss + penalty() if call else loss).backward()
        optimizer.step()


def test_a_penalty_that_is_never_called_warns_once() -> None:
    model = network()
    penalty = Penalty(model, WEIGHT_RULES)
    _trained(penalty, model, UNCALLED - 1)
    with pytest.warns(GonioWarning, match="SGD made 10 steps with .*, which was not called") as said:
        _trained(penalty, model, UNCALLED)
    assert len(said) == 1


@pytest.mark.parametrize("why", ["called", "undone", "other weights", "gone"])
def test_a_penalty_that_needs_no_call_is_silent(why: str, recwarn: pytest.WarningsRecorder) -> None:
    model = network()
    penalty = Penalty(model, WEIGHT_RULES)
    if why == "undone":
        penalty.undo_()
    other = penalty if why != "gone" else Penalty(network(), WEIGHT_RULES)
    if why == "gone":
        del penalty
    _trained(other, network() if why == "other weights" else model, UNCALLED + 1, call=why == "called")
    assert [each for each in recwarn if issubclass(each.category, GonioWarning)] == []


Use = Callable[[Penalty], Tensor | float]
WITHOUT_EFFECT: dict[str, Use] = {
    "a number": lambda penalty: penalty().item(),
    "detached": lambda penalty: penalty().detach(),
    "without gradients": torch.no_grad()(lambda penalty: penalty()),
}


def _with(use: Use, model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    penalty = Penalty(model, WEIGHT_RULES)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(batch()).square().mean() + use(penalty)).backward()
        optimizer.step()


@pytest.mark.parametrize("use", WITHOUT_EFFECT)
def test_a_penalty_whose_gradient_is_never_computed_warns_once(use: str) -> None:
    with pytest.warns(GonioWarning, match="was called, but no backward pass has reached it") as said:
        _with(WITHOUT_EFFECT[use], network(), UNCALLED + 3)
    assert len(said) == 1


def test_a_penalty_that_has_nothing_to_differentiate_is_silent(recwarn: pytest.WarningsRecorder) -> None:
    frozen = network()
    for layer in frozen:
        layer.requires_grad_(False)
    frozen.append(nn.Linear(5, 5).double())
    optimizer = torch.optim.SGD(frozen.parameters(), lr=1e-3)
    penalty = Penalty(frozen, [("4", R.L2(0.1))])
    later = Penalty(frozen, [("5", R.L2(0.1, schedule=R.Milestones((0, 20), (0.0, 1.0))))])
    for _ in range(UNCALLED + 1):
        (frozen(batch()).square().mean() + penalty() + later()).backward()
        optimizer.step()
    _with(lambda penalty: penalty() / 4 * 2, network(), UNCALLED + 1)
    called = Penalty(model := network(), WEIGHT_RULES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(UNCALLED + 1):
        gradients = torch.autograd.grad(model(batch()).square().mean() + called(), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert [each for each in recwarn if issubclass(each.category, GonioWarning)] == []
