"""Checkpoints in every format, loaded into one another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError
from parametrizations.layers import LAYERS, MEMBERS, make, parametrized, sample

ONE = pytest.mark.parametrize("member", MEMBERS)


@ONE
@pytest.mark.parametrize("name", LAYERS)
def test_a_plain_checkpoint_becomes_the_effective_weight(member: str, name: str) -> None:
    plain, layer, attached = make(name, seed=3), parametrized(member, name), parametrized(member, name, seed=3)
    parameters = list(layer.parameters())
    assert layer.load_state_dict(plain.state_dict(), strict=True)
    assert all(a is b for a, b in zip(parameters, layer.parameters(), strict=True))
    x = sample(layer)
    torch.testing.assert_close(layer(x), attached(x))
    if MEMBERS[member].keeps_weight:
        torch.testing.assert_close(layer(x), plain(x))


@ONE
def test_a_parametrized_checkpoint_is_refused_by_a_plain_model(member: str) -> None:
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*weight_parametrization"):
        make("conv2d").load_state_dict(parametrized(member, "conv2d").state_dict())


@ONE
@pytest.mark.parametrize("name", LAYERS)
def test_a_folded_checkpoint_computes_the_same(member: str, name: str) -> None:
    layer, plain = parametrized(member, name), make(name, seed=2)
    plain.load_state_dict(P.plain_state_dict(layer.state_dict()))
    x = sample(layer)
    torch.testing.assert_close(plain(x), layer(x))


@ONE
@pytest.mark.parametrize("other", MEMBERS)
def test_own_checkpoints_load_into_one_another(member: str, other: str) -> None:
    source, target = nn.Sequential(parametrized(member, "conv2d")), nn.Sequential(parametrized(other, "conv2d", seed=7))
    target.load_state_dict(source.state_dict())
    expected = parametrized(other, "conv2d")
    if member == other:
        assert torch.equal(target[0].weight, source[0].weight)
    else:
        expected.weight = source[0].weight.detach()
        torch.testing.assert_close(target[0].weight, expected.weight)
    assert P.parametrization_of(target[0]).holds(target[0].weight)


TORCH: dict[str, Callable[[nn.Module], nn.Module]] = {
    "old weight norm": nn.utils.weight_norm,
    "new weight norm": nn.utils.parametrizations.weight_norm,
    "old spectral norm": nn.utils.spectral_norm,
    "new spectral norm": nn.utils.parametrizations.spectral_norm,
}
FUTURE = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
TORCH_LAYERS = ["linear", "conv2d", "grouped conv2d", "transposed conv2d", "grouped transposed conv2d"]


def torchs(form: str, name: str) -> nn.Module:
    """A layer with torch's parametrization that has trained a little."""
    layer = TORCH[form](make(name, seed=1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        layer(sample(layer)).square().mean().backward()
        optimizer.step()
    return layer.eval()


@FUTURE
@pytest.mark.parametrize("name", TORCH_LAYERS)
@pytest.mark.parametrize("form", TORCH)
@ONE
def test_torchs_checkpoints_mean_their_effective_weight(member: str, form: str, name: str) -> None:
    source, target = torchs(form, name), parametrized(member, name)
    x = sample(target)
    with torch.no_grad():
        outputs, weight = source(x), source.weight.detach().clone()
    model = nn.Sequential(target)
    model.load_state_dict({f"0.{key}": value for key, value in source.state_dict().items()})
    if MEMBERS[member].keeps_weight:
        torch.testing.assert_close(model.eval()(x), outputs)
    else:
        expected = parametrized(member, name)
        expected.weight = weight
        torch.testing.assert_close(target.weight, expected.weight)


@FUTURE
@pytest.mark.parametrize("name", TORCH_LAYERS)
@pytest.mark.parametrize("form", TORCH)
def test_torchs_checkpoints_fold_to_plain_ones(form: str, name: str) -> None:
    source, plain = torchs(form, name), make(name)
    plain.load_state_dict(P.plain_state_dict(source.state_dict()))
    x = sample(plain)
    torch.testing.assert_close(plain(x), source(x))


def test_what_cannot_be_folded_is_refused() -> None:
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    with pytest.raises(InvalidArgumentError, match=r"found parametrizations\.weight of another kind"):
        P.plain_state_dict(layer.state_dict())
    with pytest.raises(
        InvalidArgumentError, match=r"load_state_dict\(\) converts .*; found parametrizations\.weight of"
    ):
        parametrized(next(iter(MEMBERS)), "linear").load_state_dict(layer.state_dict())


@pytest.mark.parametrize("form", ["old spectral norm", "new spectral norm"])
def test_torchs_spectral_norm_of_groups_is_refused(form: str) -> None:
    """It is one matrix there; the groups' own norms are below 1."""
    layer = make("grouped conv2d")
    P.attach(layer, "weight", P.SpectralNorm())
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    with pytest.raises(
        InvalidArgumentError, match=r"spectral norm of 2 groups, .* loading it would rescale the weight"
    ):
        layer.load_state_dict(torchs(form, "grouped conv2d").state_dict())
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_unknown_kinds_and_newer_versions_are_refused() -> None:
    state = parametrized("WeightNorm", "linear").state_dict()
    text = bytes(state["weight_parametrization._extra_state"].tolist()).decode()
    for old, new in (('"WeightNorm"', '"Unheard"'), ('"version": 1', '"version": 2')):
        state["weight_parametrization._extra_state"] = torch.tensor(
            list(text.replace(old, new).encode()), dtype=torch.uint8
        )
        with pytest.raises(InvalidArgumentError, match="Load it with the version of gonio that wrote it"):
            P.plain_state_dict(state)


def test_the_state_of_another_parametrization_is_refused() -> None:
    state = parametrized("WeightNorm", "linear").weight_parametrization.state_dict()
    with pytest.raises(InvalidArgumentError, match="found that of WeightNorm"):
        P.Sphere().load_state_dict(state, strict=False)


def test_partial_state_dicts() -> None:
    layer = parametrized("WeightNorm", "linear")
    before = layer.weight.detach().clone()
    layer.load_state_dict({"bias": torch.ones(4)}, strict=False)
    assert torch.equal(layer.weight, before)
    missing = layer.load_state_dict({}, strict=False).missing_keys
    assert set(missing) == set(layer.state_dict())
