"""`fold_`: kinds of layers, deviations by dtype, foreign parametrizations, refusals with the reason."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations as torchs
from torch.nn.utils import parametrize, prune

import gonio
from catalog import seeded
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError, NoMatchError, NotApplicableError
from gonio.nn import angular, magnitude
from gonio.surgery import equivalent, fold, fold_
from laws.snapshot import Snapshot, assert_restored
from networks import ResNet18, images
from surgery.net import Activated, Doubled, Net, batch_only, tied, trained

X = seeded(3, 6, 8, 8, dtype=torch.float64)
# A fold may move the outputs by this much, relative. The halves are checked against the float64 model, where both
# the folded and the unfolded model lose what their dtype loses; folding must not lose more than twice as much.
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
FOLDED: dict[str, Callable[[], P.Parametrization] | None] = {
    "no parametrization": None,
    "WeightNorm": P.WeightNorm,
    "SpectralNorm": P.SpectralNorm,
    "Orthogonal": P.Orthogonal,
    "WeightStandardization": P.WeightStandardization,
}


def deviation(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.grid(3)
@pytest.mark.parametrize("template", FOLDED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("prefix", "dims"), list(itertools.product(("Conv", "ConvTranspose"), (1, 2, 3))))
def test_layer_and_norm_become_one_plain_layer(prefix: str, dims: int, groups: int, bias: bool, template: str) -> None:
    kind, channels = getattr(nn, f"{prefix}{dims}d"), (4, 8) if bias else (8, 4)
    for dtype, allowed in LIMITS.items():
        torch.manual_seed(0)
        layer = kind(*channels, 3, stride=2, padding=1, groups=groups, bias=bias)
        model = nn.Sequential(layer, trained(NORMS[dims](channels[1])), nn.ReLU()).to(dtype).eval()
        make = FOLDED[template]
        if make is not None:
            gonio.parametrize_(model, make())
        x = seeded(2, channels[0], *[5] * dims, dtype=dtype)
        expected = model(x)
        gonio.fold_(model, example=x)
        assert type(model[0]) is kind
        assert type(model[1]) is nn.Identity
        assert deviation(model(x), expected) <= allowed


def test_batch_norm_folds_into_linear_layers() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), trained(nn.BatchNorm1d(5))).double().eval(), X[..., 0, 0]
    expected = model(x)
    fold_(model, example=x)
    assert type(model[1]) is nn.Identity
    assert deviation(model(x), expected) <= 1e-12


def test_a_norm_whose_input_is_read_elsewhere_stays():
    def forward(m, x):
        y = m.conv(x)
        return m.last(m.other(m.norm(y) + y))

    norm, last = (trained(nn.BatchNorm2d(4)) for _ in range(2))
    model = Net(forward, conv=nn.Conv2d(6, 4, 1), norm=norm, other=nn.Conv2d(4, 4, 1), last=last).double()
    fold_(model, example=X)
    assert type(model.norm) is nn.BatchNorm2d
    assert type(model.last) is nn.Identity


@pytest.mark.parametrize("make", [P.WeightNorm, P.Sphere], ids=lambda make: make.__name__)
def test_a_parametrized_copy_folds_and_the_original_stays(make):
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(144, 3)).double()
    gonio.parametrize_(model, make())
    expected, average = model(X).detach(), copy.deepcopy(model)
    fold_(average, example=X)
    assert [type(m) for m in average] == [nn.Conv2d, nn.Flatten, nn.Linear]
    assert deviation(average(X), expected) <= 1e-12
    assert torch.equal(model(X), expected)
    assert P.is_parametrized(model[0])
    model(X).sum().backward()
    assert torch.isfinite(model[0]._parameters["weight"].grad).all()


def test_switchable_norm_folds_if_its_mixture_is_batch_statistics_alone():
    model = nn.Sequential(nn.Conv2d(6, 4, 3), trained(nn.BatchNorm2d(4))).double().eval()
    gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
    assert "1 stays: its mixture is not batch statistics alone" in str(fold_(model))
    batch_only(model[1])
    expected = model(X)
    fold_(model, example=X)
    assert type(model[1]) is nn.Identity
    assert deviation(model(X), expected) <= 1e-12


def test_decoupled_layers_fold_where_they_are_linear_and_are_refused_by_name_elsewhere():
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.Conv2d(4, 4, 3)).double().eval()
    linear = {"magnitude": magnitude.Linear(), "angular": angular.Cosine()}
    gonio.swap_(model, gnn.DecoupledConv2d.from_conv, where="0", **linear)
    gonio.swap_(model, gnn.DecoupledConv2d.from_conv, where="1", magnitude=magnitude.Tanh())
    expected = model(X)
    text = str(fold_(model, example=X))
    assert type(model[0]) is nn.Conv2d
    assert type(model[1]) is gnn.DecoupledConv2d
    assert "1 stays" in text
    assert deviation(model(X), expected) <= 1e-12
    with pytest.raises(NotApplicableError, match="its output is not linear in its input"):
        fold_(model, where="1")


def test_a_model_that_cannot_be_traced_still_folds_its_parametrizations_and_says_what_stays():
    def forward(m, x):
        return m.norm(m.conv(x)) if x.sum() > -1e9 else x

    model = Net(forward, conv=nn.Conv2d(6, 4, 1), norm=nn.BatchNorm2d(4)).double()
    gonio.parametrize_(model, P.Sphere())
    assert "norm stays: the model cannot be traced" in str(fold_(model, example=X))
    assert type(model.conv) is nn.Conv2d


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


def enlarging() -> Net:
    """A chaotic map behind a norm: what rounds differently in the first place is somewhere else in the end."""

    def forward(m, x):
        y = torch.sigmoid(m.layers(x))
        for _ in range(20):
            y = 3.9 * y * (1 - y)
        return y

    return Net(forward, layers=nn.Sequential(nn.Conv2d(2, 4, 1), trained(nn.BatchNorm2d(4))))


def test_rounding_that_the_model_enlarges_is_no_mistake_of_the_fold() -> None:
    model, x = enlarging().eval(), seeded(4, 2, 5, 5)
    before = model(x).detach()
    text = str(fold_(model, example=x))
    assert deviation(model(x), before) > 10 * LIMITS[torch.float32]
    assert "this model enlarges rounding: in float64 its outputs differ by" in text


@pytest.mark.parametrize("make", [enlarging, lambda: nn.Sequential(nn.Conv2d(2, 4, 1), trained(nn.BatchNorm2d(4)))])
def test_a_mistake_of_the_fold_is_found_and_taken_back(make, monkeypatch: pytest.MonkeyPatch) -> None:
    affine = fold.affine_map
    monkeypatch.setattr(fold, "affine_map", lambda norm: tuple(1.01 * part for part in affine(norm)))
    model, x = make().double().eval(), seeded(4, 2, 5, 5, dtype=torch.float64)
    before = Snapshot.of(model, x)
    with pytest.raises(NotApplicableError, match="the outputs changed: largest deviation"):
        fold_(model, example=x)
    assert_restored(before, Snapshot.of(model, x))


def shared() -> nn.Module:
    model = tied(nn.ReLU()).double()
    gonio.parametrize_(model, P.WeightStandardization(scale="fan_in", gain=1.7))
    return model


def test_a_parametrization_that_layers_share_is_folded_once() -> None:
    model, x = shared(), seeded(3, 4, dtype=torch.float64)
    before, expected = Snapshot.of(model, x), model(x)
    edited = fold_(model, example=x)
    assert torch.equal(model(x), expected)
    assert model[0].weight is model[2].weight
    edited.undo_()
    assert_restored(before, Snapshot.of(model, x))


def test_a_shared_weight_is_folded_in_all_of_its_layers_or_in_none() -> None:
    model = shared()
    with pytest.raises(NotApplicableError, match="it shares its weight with a layer that is not selected"):
        fold_(model, where="0")
    assert P.is_parametrized(model[0])


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


NOT_AFTER_A_LAYER = "its input is not the output of a linear or convolutional layer of torch"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(Doubled(2, 2, 1), nn.BatchNorm2d(2)), NOT_AFTER_A_LAYER),
        (nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), nn.BatchNorm2d(2)), NOT_AFTER_A_LAYER),
        (nn.Sequential(nn.BatchNorm2d(2)), NOT_AFTER_A_LAYER),
        (nn.Sequential(nn.Conv2d(2, 2, 1), Activated(2)), "Activated does not compute what a batch norm computes"),
        (nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, track_running_stats=False)), "no running statistics"),
        (Hooked(), "it or the layer before it has forward hooks"),
        (Unused(), "it does not run"),
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


class Domains(nn.Module):
    """A norm for each domain, which a setting chooses (domain-specific batch normalisation)."""

    def __init__(self, *, listed: bool, whole: bool) -> None:
        super().__init__()
        norms = [trained(nn.BatchNorm2d(3)) for _ in range(2)]
        parts = [nn.Sequential(nn.Conv2d(2, 3, 1), norm) if whole else norm for norm in norms]
        self.first = nn.Identity() if whole else nn.Conv2d(2, 3, 1)
        self.part, self.other = nn.ModuleList(parts) if listed else None, None if listed else parts[1]
        self.one = None if listed else parts[0]
        self.domain = 0

    def forward(self, x):
        x = self.first(x)
        if self.part is not None:
            return self.part[self.domain](x)
        return self.other(x) if self.domain else self.one(x)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_norm_that_a_setting_replaces_folds_only_into_a_layer_that_is_replaced_too(listed: bool, whole: bool) -> None:
    model, x = Domains(listed=listed, whole=whole).eval(), seeded(2, 2, 3, 3)
    before = [model(x), (setattr(model, "domain", 1), model(x))[1]]
    model.domain = 0
    edited = fold_(model, example=x)
    assert len(edited.changes) == whole
    assert whole or "does not run, and a setting of the model may put it in the place of" in str(edited)
    after = [model(x), (setattr(model, "domain", 1), model(x))[1]]
    torch.testing.assert_close(after, before)


def test_a_norm_before_which_another_head_may_read_stays() -> None:
    """The head is off, and reads the output of the convolution where a flag turns it on."""

    def forward(m, x):
        y = m.conv(x)
        z = m.out(torch.relu(m.norm(y)))
        return (z, m.aux(y)) if m.both else z

    layers = {"conv": nn.Conv2d(2, 5, 1), "norm": trained(nn.BatchNorm2d(5)), "out": nn.Conv2d(5, 3, 1)}
    model, x = Net(forward, **layers, aux=nn.Conv2d(5, 2, 1)).eval(), seeded(2, 2, 3, 3)
    model.both = False
    edited = fold_(model, example=x)
    assert not edited.changes
    assert "norm stays: aux does not run, and may read the output of its layer" in str(edited)
    del model.aux  # the control
    assert len(fold_(model, example=x).changes) == 1


def test_what_is_inside_of_a_layer_that_runs_is_not_at_rest() -> None:
    """torch's attention reads the weight of its output without calling the layer that holds it."""

    def forward(m, x):
        y = m.norm(m.conv(x)).flatten(2).transpose(1, 2)
        return m.attention(y, y, y)[0]

    layers = {"conv": nn.Conv2d(2, 4, 1), "norm": trained(nn.BatchNorm2d(4))}
    model = Net(forward, **layers, attention=nn.MultiheadAttention(4, 2, batch_first=True)).eval()
    assert len(fold_(model, example=seeded(2, 2, 3, 3)).changes) == 1


@pytest.mark.parametrize("gains", [False, True])
def test_a_model_that_reads_an_attribute_of_its_norm_is_refused_and_left_as_it_was(gains: bool) -> None:
    def forward(m, x):
        return m.norm(m.conv(x)).view(x.shape[0], m.norm.num_features, -1).mean(2)

    model, x = Net(forward, conv=nn.Conv2d(2, 2, 1), norm=trained(nn.BatchNorm2d(2))), seeded(2, 2, 3, 3)
    before = model(x)
    with pytest.raises(NotApplicableError, match=r"the edited model fails .AttributeError: 'Identity' object has no"):
        fold_(model, example=x, gains=gains)
    torch.testing.assert_close(model(x), before)


def test_the_norm_of_a_compiled_model_folds() -> None:
    model = torch.compile(trained(nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))), backend="eager")
    fold_(model, example=seeded(2, 2, 3, 3))
    assert type(model._orig_mod[1]) is nn.Identity


def test_what_training_does_otherwise_is_no_obstacle() -> None:
    """In training the norm's input is read twice; the result is what evaluation computes."""

    def forward(m, x):
        y = m.conv(x)
        return m.norm(y) + y.mean() if m.training else m.norm(y)

    model = Net(forward, conv=nn.Conv2d(2, 2, 1), norm=trained(nn.BatchNorm2d(2)))
    assert len(fold_(model, example=seeded(2, 2, 3, 3)).changes) == 1
    assert model.training


TORCHS = (torchs.weight_norm, torchs.spectral_norm, torchs.orthogonal)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("parametrized", TORCHS)
def test_a_parametrization_of_torch_folds_and_comes_back(parametrized, training: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    parametrized(model[0])
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
    message = "0 stays: a hook of torch.nn.utils computes its weight: use remove_spectral_norm() or prune.remove()"
    assert message in str(fold_(model))


def test_equivalent_reports_both_deviations() -> None:
    a, b, example = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False), torch.ones(3, 2)
    with torch.no_grad():
        a.weight.fill_(1.0)
        b.weight.fill_(1.5)
    found = equivalent(a, b, example=example)
    assert (found.absolute, found.relative) == (1.0, 0.5)
    with pytest.raises(InvalidArgumentError, match="compares two models with outputs of the same shapes"):
        equivalent(a, nn.Linear(2, 2), example=example)
    with pytest.raises(InvalidArgumentError, match="compares finite outputs"):
        equivalent(a, b, example=torch.full((3, 2), float("nan")))
