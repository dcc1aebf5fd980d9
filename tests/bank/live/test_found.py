"""What the bank of live models found, by kind: each once by itself."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gonio
from bank.live.structures import AnswersNone, Forwarding, Halved
from catalog import seeded
from gonio import init, optim
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NoMatchError, NotApplicableError
from gonio.surgery.graph import trace
from surgery.net import Net

X = seeded(4, 8)


# --- the bound of a model ---------------------------------------------------------------------------


class Constants(nn.Module):
    """Computes tensors from buffers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("scale", torch.linspace(1.0, 2.0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * (self.scale + 1).sqrt())


def test_a_constant_of_the_trace_is_part_of_the_bound() -> None:
    model = Constants()
    assert set(trace(model).constants) == {"_tensor_constant0"}
    found = gonio.certify(model, X, steps=20)
    exact = float(torch.linalg.matrix_norm(model.fc.weight.detach() * (model.scale + 1).sqrt(), 2))
    assert found.lower <= found.upper
    assert found.lower == pytest.approx(exact, rel=1e-3)
    assert found.upper >= exact


def test_a_model_that_does_not_run_on_one_example_has_no_bound() -> None:
    model = Net(lambda m, x: m.fc(x.chunk(2)[1]), fc=nn.Linear(8, 8))
    with pytest.raises(
        NotApplicableError, match=r"certify: cannot bound the model: it does not run on one example \(I"
    ):
        gonio.certify(model, X)


class Uncopied(nn.Linear):
    """A layer that refuses to be copied, as those with handles of a device or a file do."""

    def __deepcopy__(self, memo: Any) -> Uncopied:
        raise RuntimeError("this layer holds a handle")


def test_a_model_that_cannot_be_copied_has_no_bound() -> None:
    model = nn.Sequential(Uncopied(8, 8))
    with pytest.raises(InvalidArgumentError, match=r"a copy of the model is needed; found it cannot be copied \(Runt"):
        gonio.certify(model, X)


# --- layers that a router does not choose -----------------------------------------------------------


def large(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.b(y) if y.std() > 2 else y


def filled(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return y.index_add(0, torch.arange(len(y))[y.std(1) > 2], m.b(y[y.std(1) > 2]))


@pytest.mark.parametrize("forward", [large, filled], ids=lambda f: f.__name__)
def test_lsuv_names_a_layer_that_gets_no_values_any_more(forward: Any) -> None:
    model = Net(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    init.lecun_(model.a.weight, gain=10.0)
    before = copy.deepcopy(model.state_dict())
    edited = gonio.lsuv_(model, X, function=None)
    assert "b gets no values of the batch any more, since the layers before it have other weights" in str(edited)
    assert torch.equal(model.b.weight, before["b.weight"])
    edited.undo_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- attributes through a wrapper ---------------------------------------------------------------------


def test_a_parametrization_is_put_on_a_layer_that_answers_every_name() -> None:
    model = nn.Sequential(AnswersNone(8, 8))
    gonio.parametrize_(model, P.Sphere())
    torch.testing.assert_close(model[0].weight.norm(dim=1), torch.ones(8))


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_the_parametrization_of_a_wrapped_layer_is_not_that_of_its_wrapper(norm: Any) -> None:
    model = nn.Sequential(Forwarding(norm(nn.Linear(8, 8)))).double()
    x = X.double()
    before = model(x).detach()
    edited = gonio.fold_(model)
    assert type(model[0]) is Forwarding
    assert type(model[0].inner) is nn.Linear
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
    edited.undo_()
    assert torch.equal(model(x), before)
    with pytest.raises(AlreadyAppliedError, match="torch's own"):
        P.attach(model[0].inner, "weight", P.Sphere())


# --- what a swap needs ----------------------------------------------------------------------------------


def statistics(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.conv(x)) + m.bn.running_mean.view(1, -1, 1, 1)


def by_function(m: Any, x: Tensor) -> Tensor:
    return F.batch_norm(m.conv(x), m.bn.running_mean, m.bn.running_var, m.bn.weight, m.bn.bias)


def variance(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.conv(x)) * m.bn.running_var.mean()


def counted(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.conv(x)) + m.bn.num_batches_tracked


@pytest.mark.parametrize("forward", [statistics, by_function, variance, counted], ids=lambda f: f.__name__)
def test_a_norm_whose_statistics_the_model_reads_stays(forward: Any) -> None:
    model = Net(forward, conv=nn.Conv2d(3, 8, 3), bn=nn.BatchNorm2d(8)).eval()
    x = seeded(2, 3, 6, 6)
    before = model(x)
    with pytest.raises(
        NotApplicableError, match=r"the forward of the model reads its .*, which a GroupNorm does not have"
    ):
        gonio.swap_(model, gnn.to_group_norm)
    gonio.fold_(model)
    assert type(model.bn) is nn.BatchNorm2d
    assert torch.equal(model(x), before)
    gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)  # it has them
    assert bool(model(x).isfinite().all())


def test_a_complex_layer_is_not_decoupled() -> None:
    layer = nn.Linear(8, 8, dtype=torch.complex64)
    with pytest.raises(NotApplicableError, match="its weight is not a real floating-point tensor with a shape"):
        gnn.DecoupledLinear.from_linear(layer)
    with pytest.raises(NoMatchError, match="its weight is complex"):
        gonio.swap_(nn.Sequential(layer), gnn.DecoupledLinear.from_linear)


def test_a_layer_with_a_forward_of_its_own_is_not_decoupled() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].forward = Halved(model[0])
    with pytest.raises(NotApplicableError, match="computes something else"):
        gonio.swap_(model, gnn.DecoupledLinear.from_linear)


# --- sparse weights -------------------------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.weight, x.T).T


def test_muon_and_the_tracker_refuse_sparse_weights() -> None:
    model = Sparse()
    with pytest.raises(InvalidArgumentError, match=r"Muon takes dense parameters; found one of torch\.sparse_coo"):
        optim.Muon(model.parameters(), lr=0.1)
    with pytest.raises(NoMatchError, match=r"weight \(its weight is stored as sparse_coo\)"):
        gonio.Tracker(model)


def test_the_tracker_leaves_a_sparse_weight_out_and_measures_the_others() -> None:
    model = nn.Sequential(Sparse(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X).sum().backward()
        optimizer.step()
    assert {row["layer"] for row in tracker.rows} == {"1"}


# --- fresh tables -----------------------------------------------------------------------------------------


def alike(rows: int, width: int) -> Tensor:
    return seeded(1, width) + 0.5 * seeded(rows, width, seed=1)


def codes(model: nn.Module) -> set[str]:
    return {finding.code for finding in gonio.measure(model).findings if finding.level != "info"}


def test_a_fixed_table_is_no_finding_and_a_learned_one_is() -> None:
    table = nn.Embedding.from_pretrained(alike(20, 16), freeze=True)
    model = nn.Sequential(table, nn.Linear(16, 16))
    assert codes(model) == set()
    assert any("not trained, in a model that is" in note for t in gonio.measure(model).values() for note in t.notes)
    table.weight.requires_grad_(True)
    assert "G201" in codes(model)
    model.requires_grad_(False)  # a whole model that is only looked at
    assert "G201" in codes(model)


@pytest.mark.parametrize("value", [1.0, 0.5])
def test_gains_that_start_from_one_value_are_no_finding_in_a_table_and_are_one_in_a_layer(value: float) -> None:
    table, layer = nn.Embedding(9, 16), nn.Linear(16, 9)
    for module in (table, layer):
        nn.init.constant_(module.weight, value)
    assert codes(nn.Sequential(table, nn.Linear(16, 16))) == set()
    assert "G203" in codes(nn.Sequential(layer))
    with torch.no_grad():
        table.weight[0, 0] += (
            1  # rows were learned, and others are the same: a remark, as of tokens that never occurred
        )
    found = gonio.measure(nn.Sequential(table, nn.Linear(16, 16))).findings
    assert [f.level for f in found if f.code == "G203"] == ["info"]
