"""What looks like something known, by the name of a class, of a child or of a tensor, and computes something else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio.editing.where import sites
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.penalty.weights import weights_of
from gonio.surgery.graph import activation_after, followed_by_norm, trace
from surgery.net import Net


class AveragedModel(nn.Module):
    """A model of a user, whose `module` is one part of it; the second output reads inside of that part."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.module[1](self.module[0](x))
        return self.module[2](hidden), self.head(hidden)


class Longer(torch.optim.swa_utils.AveragedModel):
    """A subclass of a wrapper with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.module(x)


def test_a_class_with_the_name_of_a_wrapper_is_a_model() -> None:
    model, x = AveragedModel().double(), seeded(3, 4, dtype=torch.float64)
    model.module[0].weight.data.mul_(torch.exp2(torch.arange(8.0) - 4)[:, None])
    before = [y.detach().clone() for y in model(x)]
    gonio.balance_(model, example=x)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(before, model(x), strict=True))
    assert "head.weight" in gonio.param_groups(model, 0.1).decayed
    other = AveragedModel().double()
    other.module.load_state_dict(model.module.state_dict())
    assert gonio.equivalent(model, other, example=x).absolute > 0.1


def test_a_subclass_of_a_wrapper_with_its_own_forward_is_a_model() -> None:
    plain = nn.Linear(3, 2)
    deviation = gonio.equivalent(torch.optim.swa_utils.AveragedModel(plain), Longer(plain), example=torch.ones(1, 3))
    assert deviation.relative == pytest.approx(1.0)


class Two(nn.Module):
    """The output of a layer, and what `of` makes of `k` times it."""

    def __init__(self, k: float, of: object) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.layer.weight.data, self.layer.bias.data = seeded(4, 5), seeded(4, seed=1)
        self.k, self.of = k, of

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, self.of(self.k * y, y)


@pytest.mark.parametrize(
    "of",
    [lambda a, b: torch.complex(b, a), lambda a, _: a.argmax(1), lambda a, _: a > 0],
    ids=["complex", "index", "bool"],
)
def test_every_tensor_of_the_outputs_is_compared(of) -> None:
    x = seeded(16, 5, seed=2)
    assert gonio.equivalent(Two(1.0, of), Two(1.0, of), example=x).absolute == 0
    assert gonio.equivalent(Two(1.0, of), Two(-3.0, of), example=x).relative > 0.1


def flattened(how):
    """A network of two layers, with `how` between them."""
    model = Net(lambda m, x: m.b(how(m, F.relu(m.a(x)))), a=nn.Conv2d(1, 3, 2), b=nn.Linear(12, 2)).double()
    model.a.weight.data.mul_(torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64).view(3, 1, 1, 1))
    return model


SPELLINGS = {
    "size": lambda _, y: y.view(y.size(0), -1),
    "shape": lambda _, y: y.reshape(y.shape[0], -1),
    "sizes": lambda _, y: y.view(y.size()[0], -1),
    "end": lambda _, y: torch.flatten(y, 1, -1),
    "method": lambda _, y: y.flatten(1, end_dim=-1),
    "tuple": lambda _, y: y.view((y.size(0), -1)),
}


@pytest.mark.parametrize("how", SPELLINGS.values(), ids=SPELLINGS)
def test_flattening_is_followed_however_it_is_written(how) -> None:
    model, x = flattened(how), seeded(2, 1, 3, 3, dtype=torch.float64)
    before = model(x)
    assert activation_after(model) == {"a": "relu", "b": "linear"}
    gonio.balance_(model, example=x)
    assert torch.allclose(before, model(x), rtol=1e-12, atol=0)
    norms = model.a.weight.flatten(1).norm(dim=1)
    assert norms.max() / norms.min() < 1e3


def test_other_reshaping_pins_the_scale() -> None:
    """The rows of another tensor may be others."""
    for how in (lambda _, y: y.view(y.size(1), -1).view(2, 12), lambda _, y: y.view(-1, 12)):
        with pytest.raises(NotApplicableError, match=r"view \(view\) is not known to be positively homogeneous"):
            gonio.balance_(flattened(how))


def test_pooling_of_all_positions_reads_the_sizes() -> None:
    model = Net(
        lambda m, x: m.b((lambda y: F.avg_pool2d(y, y.size()[2:]))(F.relu(m.a(x))).flatten(1)),
        a=nn.Conv2d(1, 3, 1), b=nn.Linear(3, 2),
    ).double()  # fmt: skip
    x = seeded(2, 1, 4, 4, dtype=torch.float64)
    assert "largest deviation" in str(gonio.balance_(model, example=x))


def test_long_chains_are_followed() -> None:
    """More layers than Python nests calls."""
    chain = nn.Sequential(nn.Linear(2, 2), *(nn.Identity() for _ in range(1500)), nn.BatchNorm1d(2))
    assert followed_by_norm(chain) == {"0": "1501"}
    assert activation_after(chain) == {"0": "linear"}
    graph = trace(chain, dims={"0": 2})
    assert graph.dims_of(graph.nodes[-2]) == 2


def test_a_pooling_that_sums_is_no_mean() -> None:
    """A dead filter whose bias an average pooling with another divisor adds up."""
    for pool in (nn.AvgPool2d(2, divisor_override=1), lambda y: F.avg_pool2d(y, 2, divisor_override=1)):
        parts = {"pool": pool} if isinstance(pool, nn.Module) else {}
        model = Net(
            lambda m, x, pool=pool: m.b(getattr(m, "pool", pool)(F.relu(m.a(x)))),
            a=nn.Conv2d(1, 3, 1), b=nn.Conv2d(3, 2, 1), **parts,
        ).double()  # fmt: skip
        model.a.weight.data[1], model.a.bias.data[1] = 0, 0.7
        x = seeded(2, 1, 4, 4, dtype=torch.float64)
        before = model(x).detach()
        with pytest.raises(NotApplicableError, match="constant"):
            gonio.recycle_(model, example=x)
        assert torch.equal(before, model(x))


class NamedCall(nn.Module):
    """Calls its layers by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(input=F.relu(self.norm(input=self.a(input=x))))


def test_layers_are_called_by_keyword() -> None:
    model, x = NamedCall().double(), seeded(32, 4, dtype=torch.float64)
    model.a.weight.data[2] = 0
    gonio.recycle_(model, example=x)
    gonio.calibrate_(model, [x])
    assert torch.allclose(model.norm.running_mean, model.a(x).mean(0))
    model.a.weight.data.mul_(8)
    gonio.surgery.match_statistics_(model, [x])
    with pytest.raises(InvalidArgumentError, match="5 features at the layer 'a', which takes 4"):
        gonio.equivalent(model, model, example=seeded(3, 5, dtype=torch.float64))


class LastNorm(nn.Module):
    """Normalises the last dimension by statistics with the names of a batch norm's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.running_mean) * self.running_var.rsqrt()


@pytest.mark.parametrize("sizes", [(8, 4, 4), (8, 7, 4), (8, 4)])
def test_statistics_of_another_dimension_are_not_replaced(sizes) -> None:
    model = nn.Sequential(LastNorm(4))
    x = torch.arange(float(torch.Size(sizes).numel())).view(sizes)
    if len(sizes) == 2:  # there the last dimension is the second
        gonio.calibrate_(model, [x])
        assert torch.allclose(model[0].running_mean, x.mean(0))
        return
    with pytest.raises(NotApplicableError, match="are not those of the second dimension of its input"):
        gonio.calibrate_(model, [x])
    assert not model[0].running_mean.any()


def test_a_subclass_of_instance_norm_takes_one_sample() -> None:
    class Own(nn.InstanceNorm2d):
        pass

    x = seeded(4, 4, 6)
    found = []
    for kind in (Own, nn.InstanceNorm2d):
        norm = kind(4, track_running_stats=True)
        gonio.calibrate_(nn.Sequential(norm), [x])
        found.append(norm.running_var)
    assert torch.equal(*found)
    assert torch.allclose(found[0], x.flatten(1).var(1))


class WithScale(nn.Linear):
    """A linear layer with one more parameter, whose name begins as that of its weight."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight_scale = nn.Parameter(torch.ones(()))
        self.w_g = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight_scale * self.w_g


@pytest.mark.filterwarnings("ignore:.*is deprecated in favor of:FutureWarning")
def test_parameters_of_a_weight_are_those_of_its_hook() -> None:
    model = nn.Sequential(torch.nn.utils.weight_norm(WithScale()))
    for name in ("weight_g", "weight_v"):
        model[0]._parameters[name].requires_grad_(False)
    groups = gonio.param_groups(model, 0.1)
    assert groups.spared == {
        "0.bias": "a bias",
        "0.weight_scale": "one number per unit",
        "0.w_g": "one number per unit",
    }
    (ref,) = weights_of(next(site for site in sites(model) if site.path == "0"))
    assert len(ref.parameters()) == 2
    assert ref.frozen


def test_a_hook_of_a_user_does_not_stop_folding() -> None:
    layer = WithScale()
    layer.register_forward_pre_hook(lambda *_: None)
    model = nn.Sequential(layer, nn.Linear(4, 2))
    gonio.parametrize_(model, gonio.parametrizations.Sphere(), where="1")
    assert "hook" not in str(gonio.fold_(model))
