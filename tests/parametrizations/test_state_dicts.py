"""Checkpoints in every format, loaded into one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError
from gonio.parametrizations import parametrization
from parametrizations.layers import LAYERS, MEMBERS, make, parametrized, sample

ONE = pytest.mark.parametrize("member", MEMBERS)


@pytest.mark.grid(3)
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


@pytest.mark.grid(3)
@ONE
@pytest.mark.parametrize("name", LAYERS)
def test_a_folded_checkpoint_computes_the_same(member: str, name: str) -> None:
    layer, plain = parametrized(member, name), make(name, seed=2)
    plain.load_state_dict(P.plain_state_dict(layer.state_dict()))
    x = sample(layer)
    torch.testing.assert_close(plain(x), layer(x))


@pytest.mark.grid(2)
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


@pytest.mark.grid(3)
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


def described(text: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=dtype)


def test_unknown_kinds_and_newer_versions_are_refused() -> None:
    state = parametrized("WeightNorm", "linear").state_dict()
    text = bytes(state["weight_parametrization._extra_state"].to(torch.uint8).tolist()).decode()
    for old, new in (('"WeightNorm"', '"Unheard"'), ('"version": 2', '"version": 3')):
        state["weight_parametrization._extra_state"] = described(text.replace(old, new))
        with pytest.raises(InvalidArgumentError, match="with the version of gonio that wrote it"):
            P.plain_state_dict(state)


@pytest.mark.parametrize("name", ["linear", "wide linear"])
@pytest.mark.parametrize("member", ["Sphere", "WeightNorm", "SpectralNorm", "Orthogonal"])
def test_files_of_version_1_load(member: str, name: str) -> None:
    """Their description is in uint8, and large spectral norms have no block of vectors."""
    make_layer = (lambda: make("linear")) if name == "linear" else (lambda: nn.Linear(90, 80))
    torch.manual_seed(0)
    source = make_layer()
    P.attach(source, "weight", getattr(P, member)())
    state = {key: value for key, value in source.state_dict().items() if not key.endswith(".basis")}
    text = bytes(state["weight_parametrization._extra_state"].to(torch.uint8).tolist()).decode()
    state["weight_parametrization._extra_state"] = described(text.replace('"version": 2', '"version": 1'), torch.uint8)
    expected = source.weight.detach()
    torch.testing.assert_close(P.plain_state_dict(state)["weight"], expected)
    target = make_layer()
    P.attach(target, "weight", getattr(P, member)())
    target.load_state_dict(state)
    torch.testing.assert_close(target.weight, expected)


@pytest.mark.parametrize("member", ["Sphere", "WeightNorm", "SpectralNorm"])
@pytest.mark.parametrize("change", ["float16", "bfloat16", "averaged", "moving average"])
def test_cast_and_averaged_state_dicts_load(member: str, change: str) -> None:
    layer, other = make("linear"), make("linear", seed=5)
    for each in (layer, other):
        P.attach(each, "weight", getattr(P, member)())
    state = layer.state_dict()
    if change == "averaged":
        state = {key: torch.stack([value, value, value]).float().mean(0) for key, value in state.items()}
    elif change == "moving average":
        moving = {key: value.clone() for key, value in state.items()}
        for _ in range(100):
            moving = {key: value.mul_(0.9).add_(state[key], alpha=0.1) for key, value in moving.items()}
        state = moving
    else:
        state = {key: value.to(getattr(torch, change)) for key, value in state.items()}
    other.load_state_dict(state)
    torch.testing.assert_close(other.weight, layer.weight, rtol=2e-2, atol=1e-2)
    with pytest.raises(InvalidArgumentError, match="codes of a JSON text; found other numbers"):
        other.load_state_dict({key: value * 1.5 for key, value in state.items()})


def test_gates_with_the_names_of_a_norm_are_kept() -> None:
    """Two equal weights, or vectors of other lengths, are no weight norm and no spectral norm."""
    gates = {"mlp.w_g": torch.ones(8, 4), "mlp.w_v": torch.ones(8, 4)}
    odd = {"x_orig": torch.ones(8, 4), "x_u": torch.ones(3), "x_v": torch.ones(4)}
    beside = {"y": torch.ones(8, 4), "y_g": torch.ones(8, 1), "y_v": torch.ones(8, 4)}
    for state in (gates, odd, beside):
        assert P.plain_state_dict(state).keys() == state.keys()
    norm = {"w_g": torch.full((8, 1), 2.0), "w_v": torch.ones(8, 4)}
    assert torch.equal(P.plain_state_dict(norm)["w"], torch.ones(8, 4))


def test_a_class_of_the_users_with_a_name_of_gonios_is_another_kind() -> None:
    layer, mine = make("linear"), make("linear")
    P.attach(layer, "weight", P.Sphere())

    class Sphere(P.Sphere):
        def weight_of(self, raw: torch.Tensor) -> torch.Tensor:
            return 2 * super().weight_of(raw)

    P.attach(mine, "weight", Sphere())
    torch.testing.assert_close(P.plain_state_dict(layer.state_dict())["weight"], layer.weight)
    torch.testing.assert_close(P.plain_state_dict(mine.state_dict())["weight"], mine.weight)
    assert not P.parametrization_of(mine).wrote(parametrization.describe(P.parametrization_of(layer).get_extra_state()))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_the_weight_of_an_old_hook_is_that_of_the_next_forward(norm: Any) -> None:
    layer = norm(nn.Conv1d(16, 32, 7)).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(5)
    before = layer.weight.detach().clone()
    found = P.weight_by_hook(layer)
    assert found is not None
    assert not torch.allclose(found, before)
    layer(torch.zeros(1, 16, 9))
    torch.testing.assert_close(found, layer.weight)
    assert found.requires_grad
    assert P.weight_by_hook(nn.Linear(2, 2)) is None


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


@pytest.mark.parametrize("layer", [nn.ConvTranspose2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.ConvTranspose1d(6, 6, 5)])
def test_the_outputs_of_a_square_spectral_norm_are_told_by_its_vectors(layer: nn.Module) -> None:
    layer = nn.utils.parametrizations.spectral_norm(layer).eval()
    state = layer.state_dict()
    plain = P.plain_state_dict(state)["weight"]
    torch.testing.assert_close(plain, layer.weight.detach(), rtol=1e-5, atol=1e-7)
    state["parametrizations.weight.0._u"] = torch.ones_like(state["parametrizations.weight.0._u"])
    with pytest.raises(InvalidArgumentError, match="which dimension holds the outputs is not known"):
        P.plain_state_dict(state)
