"""Parameters that share memory as different objects, or cannot be written to: one error before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio import init, optim
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio.editing.memory import overlapping
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.penalty import Penalty
from gonio.regularizers import L2

Shared = Callable[[nn.Parameter], Tensor]
X = seeded(16, 6, dtype=torch.float64)


def network(shared: Shared | None = None) -> nn.Sequential:
    """Of three linear layers, the weight of the second one made of that of the first."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)
    )
    model = model.double().eval()
    with torch.no_grad():
        model[0].weight[1].zero_()  # for recycle_
        model[0].weight[2] *= 1e3  # for even_out_
        model[3].running_var.fill_(100.0)  # for match_statistics_
    if shared is not None:
        model[2].weight = nn.Parameter(shared(model[0].weight).detach())
    return model


def same(weight: nn.Parameter) -> Tensor:
    return weight


def transposed(weight: nn.Parameter) -> Tensor:
    return weight.T


def shifted(weight: nn.Parameter) -> Tensor:
    """A part of the same buffer, a row further: the last row is not shared."""
    whole = torch.zeros(7, 6, dtype=weight.dtype)
    whole[:6] = weight.detach()
    weight.data = whole[:6]
    return whole[1:]


def beside(weight: nn.Parameter) -> Tensor:
    """A slice of one flat buffer behind the other weight."""
    flat = torch.cat([weight.detach().flatten(), seeded(36, dtype=weight.dtype)])
    weight.data = flat[:36].view(6, 6)
    return flat[36:].view(6, 6)


def interleaved(weight: nn.Parameter) -> Tensor:
    """Other columns of the same matrix."""
    wide = torch.cat([weight.detach(), seeded(6, 6, dtype=weight.dtype)], 1)
    weight.data = wide[:, :6]
    return wide[:, 6:]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def base_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: seeded(*value.shape, seed=7).to(value.dtype) for name, value in model.state_dict().items()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


VERBS: dict[str, Callable[[nn.Module], Any]] = {
    "init_": lambda m: gonio.init_(m, init.orthogonal_, gain=1.0),
    "lsuv_": lambda m: gonio.lsuv_(m, X),
    "shrink_intruders_": lambda m: gonio.shrink_intruders_(m, base_of(m), k=99, threshold=2, factor=0.5),
    "shrink_change_": lambda m: gonio.shrink_change_(m, base_of(m)),
    "even_out_": gonio.even_out_,
    "match_statistics_": lambda m: gonio.match_statistics_(m, [X]),
    "balance_": gonio.balance_,
    "recycle_": gonio.recycle_,
    "hold_": lambda m: optim.hold_(m, optimizer_of(m)),
    "hold_ at 2": lambda m: optim.hold_(m, optimizer_of(m), radius=2.0),
    "parametrize_": lambda m: gonio.parametrize_(m, P.Orthogonal()),
    "fold_": lambda m: gonio.fold_(m, example=X),
}
ONCE = ("init_", "lsuv_", "shrink_intruders_", "shrink_change_", "even_out_")


@pytest.mark.parametrize("shared", [transposed, shifted])
@pytest.mark.parametrize("verb", VERBS)
def test_a_weight_that_overlaps_another_one_is_refused(verb: str, shared: Shared) -> None:
    model = network(shared)
    before = state_of(model)
    pair = r"(0.weight'; it shares memory with 2.weight|2.weight'; it shares memory with 0.weight)\. Make them one, or"
    with pytest.raises(NotApplicableError, match=f"{verb.split()[0]}: cannot be applied to '{pair}"):
        VERBS[verb](model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("even_out_", "recycle_")])
@pytest.mark.parametrize("shared", [beside, interleaved])
def test_slices_of_one_buffer_that_do_not_overlap_are_edited(verb: str, shared: Shared) -> None:
    model, plain = network(shared), network(lambda weight: beside(weight).clone())
    model[0].weight.data[1:3] = plain[0].weight.data[1:3] = seeded(2, 6, dtype=torch.float64)
    for each in (model, plain):
        VERBS[verb](each)
    for mine, alone in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("verb", ONCE)
def test_two_parameters_on_the_same_entries_change_once_as_one_does(verb: str) -> None:
    model, tied = network(same), network()
    tied[2].weight = tied[0].weight
    for each in (model, tied):
        VERBS[verb](each)
    for name, value in tied.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert model[0].weight.data_ptr() == model[2].weight.data_ptr()


@pytest.mark.parametrize("verb", ["balance_", "recycle_"])
def test_a_verb_that_leaves_tied_weights_leaves_those_on_the_same_entries(verb: str) -> None:
    model = network(same)
    with pytest.raises(NotApplicableError, match=r"0 shares its weight"):
        VERBS[verb](model)


@pytest.mark.parametrize("verb", ["hold_", "parametrize_"])
def test_what_acts_at_each_step_refuses_two_parameters_on_the_same_entries(verb: str) -> None:
    model = network(same)
    with pytest.raises(NotApplicableError, match=r"'0.weight'; it shares memory with 2.weight"):
        VERBS[verb](model)
    assert type(model[0]) is nn.Linear


def test_tied_weights_of_a_loaded_state_are_one_for_measurements_and_penalties() -> None:
    model = network()
    model[2].weight = model[0].weight
    state = model.state_dict()
    loaded = network()
    loaded.load_state_dict(state, assign=True)  # torch makes two Parameters of the one tensor
    assert loaded[0].weight is not loaded[2].weight
    (entry,) = [t for t in gonio.measure(loaded).tensors if t.name == "2.weight"]
    assert entry.reason == "tied to 0.weight, where it is measured"
    torch.testing.assert_close(Penalty(loaded, [(None, L2(1.0))])(), Penalty(model, [(None, L2(1.0))])())


def expanded() -> nn.Module:
    model = network()
    model[2].weight = nn.Parameter(seeded(1, 6, dtype=torch.float64).expand(6, 6))
    return model


def windowed() -> nn.Module:
    """Each row begins one entry further, which torch does not count as sharing."""
    model = network()
    model[2].weight = nn.Parameter(seeded(11, dtype=torch.float64).as_strided((6, 6), (1, 1)))
    return model


def of_inference_mode() -> nn.Module:
    model = network()
    with torch.inference_mode():
        model[2].weight = nn.Parameter(seeded(6, 6, dtype=torch.float64), requires_grad=False)
    return model


KINDS = {
    expanded: "several of its entries are one number in memory",
    windowed: "several of its entries are one number in memory",
    of_inference_mode: "it was made in inference mode",
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "even_out_"])
def test_a_weight_that_cannot_be_written_to_is_refused(verb: str, kind: Callable[[], nn.Module]) -> None:
    model = kind()
    before = state_of(model)
    with pytest.raises(NotApplicableError, match=f"{verb.split()[0]}: cannot be applied to '2.weight'; {KINDS[kind]}"):
        VERBS[verb](model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_statistics_that_cannot_be_written_to_are_refused() -> None:
    model = network()
    model[3].running_var = torch.ones(1, dtype=torch.float64).expand(6)
    with pytest.raises(NotApplicableError, match=r"calibrate_: cannot be applied to '3\.running_var'; several"):
        gonio.calibrate_(model, [X])


def test_what_finds_turns_refuses_a_model_of_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with pytest.raises(NotApplicableError, match=r"rotate_: cannot be applied to '.*in_proj_weight'; it was made"):
        gonio.rotate_(model)


@pytest.mark.parametrize("verb", [gonio.surgery.anatomy, gonio.surgery.qk_norm, gonio.balance_])
def test_what_reads_gradients_refuses_a_model_of_inference_mode(verb: Callable[..., object]) -> None:
    with torch.inference_mode():
        model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with pytest.raises(InvalidArgumentError, match=r"found self_attn.in_proj_weight, which was made in inference mode"):
        verb(model, example=torch.ones(2, 3, 8))


def test_lazy_parameters_are_not_taken_for_those_of_inference_mode() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    assert gonio.surgery.anatomy(model, example=torch.ones(2, 5)).attention == ()
    with torch.inference_mode():
        edited = gonio.init_(model, gonio.init.orthogonal_, gain=1.0)
    assert [change.path for change in edited.changes] == ["1"]
    edited.undo_()


@pytest.mark.parametrize("verb", ["lsuv_", "match_statistics_", "balance_", "recycle_"])
def test_a_verb_that_needs_all_values_names_a_weight_without(verb: str) -> None:
    model = network()
    model[2].to("meta")
    with pytest.raises(NotApplicableError, match=r"2\.weight is on the meta device and has no values"):
        VERBS[verb](model)


def test_a_verb_that_needs_no_others_leaves_out_a_weight_without_values() -> None:
    model = network()
    model[2].to("meta")
    assert "2 stays: its weight is on the meta device" in str(gonio.even_out_(model))
    gonio.swap_(model, gnn.DecoupledLinear.from_linear)
    assert "2 stays: its weight is on the meta device" in str(gnn.project_weights_(model))


@pytest.mark.parametrize("seed", range(40))
def test_overlaps_are_those_of_a_table_of_all_bytes(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=random))  # noqa: E731
    flat = torch.zeros(200)
    tensors = []
    for _ in range(6):
        size, stride = (draw(1, 4), draw(1, 4)), (draw(0, 9), draw(0, 3))
        tensors.append(flat.as_strided(size, stride, draw(0, 150)))
    places = [
        {t.storage_offset() + i * t.stride(0) + j * t.stride(1) for i in range(t.shape[0]) for j in range(t.shape[1])}
        for t in tensors
    ]
    found = overlapping(tensors)
    for i, tensor in enumerate(tensors):
        expected = {j for j in range(6) if j != i and places[i] & places[j]}
        assert {j for j in range(6) for other in found.get(id(tensor), []) if other is tensors[j]} == expected
