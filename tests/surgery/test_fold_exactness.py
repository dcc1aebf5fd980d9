"""`fold_` beyond single layers: deviations by dtype on a network, foreign parametrizations, refusals by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations as torchs
from torch.nn.utils import parametrize, prune

import gonio
from catalog import PARAMETRIZATIONS, seeded
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio.errors import NoMatchError, NotApplicableError
from gonio.surgery import fold, fold_
from laws.snapshot import Snapshot, assert_restored
from laws.support import first_of_kind
from networks import ResNet18, images

# A fold may move the outputs by this much, relative. The halves are checked against the float64 model, where both
# the folded and the unfolded model lose what their dtype loses; folding must not lose more than twice as much.
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}


def deviation(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max())


def trained(model: nn.Module) -> nn.Module:
    """Norms away from their defaults, as after training."""
    with torch.no_grad():
        for seed, norm in enumerate(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            values = seeded(4, norm.num_features, seed=seed)
            norm.weight.copy_((0.3 * values[0]).exp())
            norm.bias.copy_(0.3 * values[1])
            norm.running_mean.copy_(0.3 * values[2])
            norm.running_var.copy_((0.5 * values[3]).exp())
    return model.eval()


TEMPLATES = {case.name.split()[0]: case.make for case in first_of_kind(PARAMETRIZATIONS)}


@pytest.mark.parametrize("name", [*TEMPLATES, "none"])
@pytest.mark.parametrize("dtype", LIMITS)
def test_a_resnet_18_with_every_parametrization_folds_within_the_limit(name: str, dtype: torch.dtype) -> None:
    model, x = trained(ResNet18(4)).to(dtype), images(2).to(dtype)
    if name != "none":
        gonio.parametrize_(model, TEMPLATES[name](), where=nn.Conv2d)
    with torch.no_grad():
        expected = model(x)
        edited = fold_(model, example=x)
        assert deviation(model(x), expected) <= LIMITS[dtype]
    assert not any(isinstance(m, (nn.BatchNorm2d, P.Parametrization)) for m in model.modules())
    assert all(type(m).__module__.startswith(("torch.", "networks")) for m in model.modules())
    assert "largest deviation" in str(edited)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_folded_than_unfolded(dtype: torch.dtype) -> None:
    exact, x = trained(ResNet18(4)).double(), images(4).to(dtype)
    model = copy.deepcopy(exact).to(dtype)
    with torch.no_grad():
        reference = exact(x.double())
        unfolded = deviation(model(x), reference)
        fold_(model, example=x)
        folded = deviation(model(x), reference)
    assert folded <= 2 * unfolded


class Enlarging(nn.Module):
    """A chaotic map behind a norm: what rounds differently in the first place is somewhere else in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 1), trained(nn.BatchNorm2d(4)))

    def forward(self, x):
        y = torch.sigmoid(self.layers(x))
        for _ in range(20):
            y = 3.9 * y * (1 - y)
        return y


def test_rounding_that_the_model_enlarges_is_no_mistake_of_the_fold() -> None:
    model, x = Enlarging().eval(), seeded(4, 2, 5, 5)
    before = model(x).detach()
    text = str(fold_(model, example=x))
    assert deviation(model(x), before) > 10 * LIMITS[torch.float32]
    assert "this model enlarges rounding: in float64 its outputs differ by" in text


@pytest.mark.parametrize("make", [Enlarging, lambda: nn.Sequential(nn.Conv2d(2, 4, 1), trained(nn.BatchNorm2d(4)))])
def test_a_mistake_of_the_fold_is_found_and_taken_back(make, monkeypatch: pytest.MonkeyPatch) -> None:
    affine = fold._affine
    monkeypatch.setattr(fold, "_affine", lambda norm: tuple(1.01 * part for part in affine(norm)))
    model, x = make().double().eval(), seeded(4, 2, 5, 5, dtype=torch.float64)
    before = Snapshot.of(model, x)
    with pytest.raises(NotApplicableError, match="the outputs changed: largest deviation"):
        fold_(model, example=x)
    assert_restored(before, Snapshot.of(model, x))


def test_a_parametrization_that_layers_share_is_folded_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    model[2].weight = model[0].weight
    gonio.parametrize_(model, P.WeightStandardization(scale="fan_in", gain=1.7))
    before, x = Snapshot.of(model, seeded(3, 4, dtype=torch.float64)), seeded(3, 4, dtype=torch.float64)
    expected = model(x)
    edited = fold_(model, example=x)
    assert torch.equal(model(x), expected)
    assert model[0].weight is model[2].weight
    edited.undo_()
    assert_restored(before, Snapshot.of(model, x))


def test_a_shared_weight_is_folded_in_all_of_its_layers_or_in_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    gonio.parametrize_(model, P.Sphere())
    with pytest.raises(NotApplicableError, match="it shares its weight with a layer that is not selected"):
        fold_(model, where="0")
    assert P.is_parametrized(model[0])


class Doubled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


class Activated(nn.BatchNorm2d):
    def forward(self, x):
        return F.relu(super().forward(x))


class Hooked(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
        self[0].register_forward_hook(lambda module, inputs, output: output + 1)


class Unused(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 2, 1))
        self.spare = nn.BatchNorm2d(2)

    def forward(self, x):
        return self[0](x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            nn.Sequential(Doubled(2, 2, 1), nn.BatchNorm2d(2)),
            "its input is not the output of a linear or convolutional layer of torch",
        ),
        (nn.Sequential(nn.Conv2d(2, 2, 1), Activated(2)), "Activated computes something else than a batch norm"),
        (
            nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), nn.BatchNorm2d(2)),
            "its input is not the output of a linear or convolutional",
        ),
        (nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, track_running_stats=False)), "no running statistics"),
        (Hooked(), "it or the layer before it has forward hooks"),
        (Unused(), "it does not run"),
        (nn.Sequential(nn.BatchNorm2d(2)), "its input is not the output of a linear"),
    ],
)
def test_what_stays_is_said_with_the_reason_and_naming_it_is_an_error(model: nn.Module, reason: str) -> None:
    path = next(name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d))
    with_more = nn.Sequential(model, nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).eval()
    before, x = with_more(seeded(2, 2, 3, 3)), seeded(2, 2, 3, 3)
    text = str(fold_(with_more, example=x))
    assert f"0.{path} stays: " in text
    assert reason in text
    torch.testing.assert_close(with_more(x), before)
    with pytest.raises((NoMatchError, NotApplicableError), match=reason):
        fold_(with_more, where=f"0.{path}")


def test_the_norm_of_a_compiled_model_folds() -> None:
    model = torch.compile(trained(nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))), backend="eager")
    fold_(model, example=seeded(2, 2, 3, 3))
    assert type(model._orig_mod[1]) is nn.Identity


def test_what_training_does_otherwise_is_no_obstacle() -> None:
    """In training the norm's input is read twice; the result is what evaluation computes."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 2, 1), trained(nn.BatchNorm2d(2))

        def forward(self, x):
            y = self.conv(x)
            return self.norm(y) + y.mean() if self.training else self.norm(y)

    model = Noisy()
    assert len(fold_(model, example=seeded(2, 2, 3, 3)).changes) == 1
    assert model.training


# --- the parametrizations of torch ------------------------------------------------------------------

TORCHS = {
    "weight_norm": torchs.weight_norm,
    "spectral_norm": torchs.spectral_norm,
    "orthogonal": torchs.orthogonal,
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", TORCHS)
def test_a_parametrization_of_torch_folds_and_comes_back(name: str, training: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    TORCHS[name](model[0])
    model.train(training)
    twin, x = copy.deepcopy(model), seeded(3, 5, dtype=torch.float64)
    before = Snapshot.of(model, x)
    expected = copy.deepcopy(model).eval()(x)
    edited = fold_(model, example=x)
    assert type(model[0]) is nn.Linear
    assert [name for name, _ in model[0].named_parameters()] == ["weight", "bias"]
    assert deviation(model(x), expected) <= 1e-12
    assert parametrize.is_parametrized(twin[0]), "the class that copies share was changed"
    edited.undo_()
    assert_restored(before, Snapshot.of(model, x))


def test_a_trained_tensor_keeps_its_object_where_there_is_one() -> None:
    model = nn.Sequential(torchs.spectral_norm(nn.Linear(4, 4)))
    original = model[0].parametrizations.weight.original
    fold_(model)
    assert model[0].weight is original


def test_hooks_of_torch_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    gonio.parametrize_(model, P.Sphere(), where="1")
    assert (
        r"0 stays: a hook of torch.nn.utils computes its weight: use remove_spectral_norm() or prune.remove()"
        in str(fold_(model))
    )


def test_a_mixture_that_is_not_of_the_batch_alone_is_said() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), gnn.SwitchableNorm2d(2), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    assert "1 stays: its mixture is not batch statistics alone" in str(fold_(model))
