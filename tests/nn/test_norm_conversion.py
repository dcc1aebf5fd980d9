"""Norms turned into one another: what stays equal, what is carried, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio import nn as gnn
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NotApplicableError
from surgery.net import Activated, batch_only
from tolerances import exact

EXACT = exact(torch.float64)
X = 2 + 3 * seeded(4, 6, 5, 3, dtype=torch.float64)
CONVERTERS = {f.__name__: f for f in (gnn.to_batch_norm, gnn.to_group_norm, gnn.to_instance_norm, gnn.to_layer_norm)}
SHAPES = {"to_layer_norm": {"positions": (5, 3)}, "to_batch_norm": {"dims": 2}, "to_instance_norm": {"dims": 2}}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "to_batch_norm": lambda: nn.BatchNorm2d(6),
    "to_group_norm": lambda: nn.GroupNorm(2, 6),
    "to_instance_norm": lambda: nn.InstanceNorm2d(6, affine=True),
    "to_layer_norm": lambda: nn.LayerNorm((6, 5, 3)),
}
SOURCES = {
    "BatchNorm2d": NORMS["to_batch_norm"],
    "GroupNorm": NORMS["to_group_norm"],
    "InstanceNorm2d": NORMS["to_instance_norm"],
    "LayerNorm": NORMS["to_layer_norm"],
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(6),
    "SwitchableNorm2d": lambda: gnn.SwitchableNorm2d(6),
}
PAIRS = [(s, t) for s in SOURCES for t in CONVERTERS if SOURCES[s] is not NORMS.get(t)]


def shaken(norm: nn.Module) -> nn.Module:
    """A norm in float64 with a scale and a shift of its own per channel."""
    with torch.no_grad():
        for seed, name in enumerate(("weight", "bias"), start=1):
            parameter = norm._parameters[name]
            if parameter is not None:
                values = seeded(parameter.shape[0], seed=seed).view(-1, *[1] * (parameter.dim() - 1))
                parameter.copy_(1 + 0.3 * values)
    return norm.double()


def normalised(kind: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What a norm of that kind computes in training, from torch's functions."""
    plain = {
        "to_batch_norm": lambda: F.batch_norm(x, None, None, training=True),
        "to_group_norm": lambda: F.group_norm(x, 3),
        "to_instance_norm": lambda: F.instance_norm(x),
        "to_layer_norm": lambda: F.layer_norm(x, x.shape[1:]),
    }[kind]()
    return plain * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_direction_keeps_scale_and_shift(source: str, target: str, frozen: bool) -> None:
    norm = shaken(SOURCES[source]()).requires_grad_(not frozen).eval()
    scale, shift = (norm._parameters[name].detach().reshape(6, -1)[:, 0] for name in ("weight", "bias"))
    state, seeds = copy.deepcopy(norm.state_dict()), torch.random.get_rng_state()
    options = {"groups": 3} if target == "to_group_norm" else SHAPES[target]
    new = CONVERTERS[target](norm, **options)
    assert torch.equal(torch.random.get_rng_state(), seeds)
    assert all(torch.equal(value, state[key]) for key, value in norm.state_dict().items())
    assert not new.training
    assert all(p.requires_grad is not frozen for p in new.parameters())
    assert all(p.dtype is torch.float64 for p in new.parameters())
    if "LayerNorm" not in (source, type(new).__name__):
        assert new.weight is norm.weight
        assert new.bias is norm.bias
    torch.testing.assert_close(new.train()(X), normalised(target, X, scale, shift), **EXACT)


def test_a_group_norm_is_a_layer_norm_or_an_instance_norm_at_the_ends() -> None:
    """One group; as many groups as channels."""
    layer, instance = shaken(nn.LayerNorm((6, 5, 3))), shaken(nn.InstanceNorm2d(6, affine=True))
    torch.testing.assert_close(gnn.to_group_norm(layer, groups=1)(X), layer(X), **EXACT)
    torch.testing.assert_close(gnn.to_group_norm(instance, groups=6)(X), instance(X), **EXACT)
    whole, single = shaken(nn.GroupNorm(1, 6)), shaken(nn.GroupNorm(6, 6))
    torch.testing.assert_close(gnn.to_layer_norm(whole, positions=(5, 3))(X), whole(X), **EXACT)
    torch.testing.assert_close(gnn.to_instance_norm(single, dims=2)(X), single(X), **EXACT)
    torch.testing.assert_close(F.group_norm(X, 1), F.layer_norm(X, X.shape[1:]), **EXACT)
    torch.testing.assert_close(F.group_norm(X, 6), F.instance_norm(X), **EXACT)


def trained(norm: nn.Module) -> nn.Module:
    norm = shaken(norm).train()
    for seed in range(3):
        norm(seed + seeded(4, 6, 5, 3, seed=seed, dtype=torch.float64))
    return norm.eval()


@pytest.mark.parametrize(
    "source",
    [
        lambda: trained(nn.InstanceNorm2d(6, affine=True, track_running_stats=True, momentum=0.3)),
        lambda: batch_only(trained(gnn.SwitchableNorm2d(6, momentum=0.3))),
    ],
    ids=["instance norm", "switchable norm"],
)
def test_statistics_that_evaluation_uses_are_carried(source: Callable[[], nn.Module]) -> None:
    norm = source()
    new = gnn.to_batch_norm(norm)
    assert new.momentum == 0.3
    assert torch.equal(new.num_batches_tracked, norm.num_batches_tracked)
    torch.testing.assert_close(new(X), norm(X), **EXACT)
    mean = norm.running_mean.clone()
    new.train()(X)
    assert torch.equal(norm.running_mean, mean)  # copies: training one leaves the other


def test_a_synchronised_batch_norm_becomes_one_of_a_single_process() -> None:
    norm = nn.SyncBatchNorm.convert_sync_batchnorm(trained(nn.BatchNorm2d(6)))
    torch.testing.assert_close(gnn.to_batch_norm(norm, dims=2)(X), norm(X), **EXACT)
    untracked = nn.SyncBatchNorm(6, track_running_stats=False, momentum=None)
    new = gnn.to_batch_norm(untracked, dims=2)
    assert new.running_mean is None
    assert new.momentum is None


def test_statistics_that_mean_something_else_are_not() -> None:
    fresh = gnn.to_batch_norm(nn.GroupNorm(2, 6), dims=2)
    assert torch.equal(fresh.running_mean, torch.zeros(6))
    assert torch.equal(fresh.running_var, torch.ones(6))
    assert gnn.to_instance_norm(trained(nn.BatchNorm2d(6))).running_mean is None
    alone = gnn.to_batch_norm(gnn.SwitchableNorm2d(6, use_batch=False))
    assert torch.equal(alone.running_var, torch.ones(6))


@pytest.mark.parametrize(
    ("channels", "asked", "found"),
    [
        (64, 32, 32),
        (32, 32, 32),
        (48, 32, 24),
        (100, 32, 25),
        (16, 32, 8),
        (7, 32, 1),
        (1, 32, 1),
        (2, 32, 1),
        (6, 6, 6),
    ],
)
def test_the_number_of_groups_falls_back_to_one_that_divides_the_channels(
    channels: int, asked: int, found: int
) -> None:
    new = gnn.to_group_norm(nn.BatchNorm2d(channels), groups=asked)
    assert new.num_groups == found
    assert new(torch.ones(2, channels, 2, 2)).isfinite().all()


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_inputs_of_every_rank(dims: int) -> None:
    x = seeded(4, 6, *[3, 4, 2][:dims], dtype=torch.float64)
    whole = shaken(nn.GroupNorm(1, 6))
    batch = gnn.to_batch_norm(whole, dims=dims)
    assert batch(x).shape == x.shape
    assert type(batch).__name__ == f"BatchNorm{max(dims, 1)}d"
    layer = gnn.to_layer_norm(batch, positions=x.shape[2:])
    torch.testing.assert_close(layer(x), whole(x), **EXACT)
    torch.testing.assert_close(gnn.to_group_norm(layer, groups=1, dims=dims)(x), whole(x), **EXACT)
    if dims:
        instance = gnn.to_instance_norm(batch, dims=dims)
        assert type(instance).__name__ == f"InstanceNorm{dims}d"
        torch.testing.assert_close(gnn.to_group_norm(instance, groups=6)(x), instance(x), **EXACT)


def test_without_scale_or_shift() -> None:
    bare = gnn.to_group_norm(nn.BatchNorm2d(6, affine=False), groups=3)
    assert (bare.weight, bare.bias) == (None, None)
    assert not list(bare.parameters())
    half = nn.LayerNorm((6, 5, 3), bias=False)
    for new in (gnn.to_group_norm(half), gnn.to_batch_norm(half), gnn.to_instance_norm(half)):
        assert new.bias is None
        assert new.weight.shape == (6,)
        assert new(X.float()).shape == X.shape
    assert gnn.to_layer_norm(gnn.to_batch_norm(half), positions=(5, 3)).bias is None


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        norms = [nn.BatchNorm2d(6), nn.LayerNorm((6, 2, 2))]
    assert all(p.is_meta for norm in norms for p in gnn.to_group_norm(norm).parameters())
    assert gnn.to_batch_norm(norms[1]).running_mean.is_meta


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda: gnn.to_batch_norm(nn.GroupNorm(2, 6)), "to_batch_norm: a GroupNorm needs dims=0 or 1 or 2 or 3; "),
        (lambda: gnn.to_instance_norm(nn.SyncBatchNorm(6)), r"a SyncBatchNorm needs dims=.*; found dims=None"),
        (lambda: gnn.to_group_norm(nn.LayerNorm(6)), r"\(6,\), which normalises the last axis .* needs dims=0; found"),
        (lambda: gnn.to_batch_norm(nn.InstanceNorm2d(6), dims=3), r"an InstanceNorm2d needs dims=2; found dims=3"),
        (lambda: gnn.to_layer_norm(nn.BatchNorm2d(6)), r"needs the sizes of 2 positions; found positions=\(\)"),
        (lambda: gnn.to_group_norm(nn.BatchNorm2d(6), groups=0), r"groups must be >= 1; found 0"),
    ],
)
def test_what_a_layer_does_not_tell_must_be_said(convert: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        convert()


def test_what_cannot_be_converted_is_refused() -> None:
    with pytest.raises(NotApplicableError, match="this subclass of BatchNorm2d computes something else"):
        gnn.to_group_norm(Activated(6))
    with pytest.raises(NotApplicableError, match="it has no shape yet"):
        gnn.to_group_norm(nn.LazyBatchNorm2d())
    with pytest.raises(NotApplicableError, match="it is no batch, layer, instance, group or switchable norm"):
        gnn.to_group_norm(nn.LocalResponseNorm(2))
    with pytest.raises(NotApplicableError, match="is an instance of its own, and would become 0"):
        gnn.to_instance_norm(nn.GroupNorm(1, 6), dims=0)
    uneven = nn.LayerNorm((6, 5, 3))
    with torch.no_grad():
        uneven.weight[2, 1, 1] = 2
    with pytest.raises(NotApplicableError, match="differs between the positions of a channel"):
        gnn.to_group_norm(uneven)


def test_a_whole_model_and_back() -> None:
    model = nn.Sequential(nn.Conv2d(6, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 6, 1), nn.BatchNorm2d(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters, before = list(model.parameters()), [type(layer) for layer in model]
    edited = gonio.swap_(model, gnn.to_group_norm, optimizer=optimizer)
    assert [(m.num_groups, m.num_channels) for m in model if isinstance(m, nn.GroupNorm)] == [(32, 64), (3, 6)]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert len(optimizer.param_groups[0]["params"]) == len(parameters)
    torch.testing.assert_close(model(X.float())[:1], model(X.float()[:1]))  # no sample depends on another
    with pytest.raises(AlreadyAppliedError, match=r"found a GroupNorm of the same factory there already"):
        gonio.swap_(model, gnn.to_group_norm)
    edited.undo_()
    assert [type(layer) for layer in model] == before


def test_new_parameters_reach_the_optimizer() -> None:
    """A layer norm's scale per element cannot be the one per channel."""
    model = nn.Sequential(nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gonio.swap_(model, gnn.to_layer_norm, optimizer=optimizer, positions=(5, 3))
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    gonio.swap_(model, gnn.to_batch_norm, optimizer=optimizer)
    assert type(model[1]) is nn.BatchNorm2d
