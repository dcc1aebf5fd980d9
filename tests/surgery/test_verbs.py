"""What the verbs do beyond the laws that `tests/laws` runs over the catalogue."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gonio
from gonio import init
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NoMatchError, NotApplicableError


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Tanh(),
        nn.Linear(8, 2),
    )


class TestInit:
    def test_a_weight_depends_on_seed_and_path_alone(self):
        one, other = network(), network()
        other.add_module("extra", nn.Linear(2, 2))
        torch.manual_seed(5)
        gonio.init_(one, init.orthogonal_, seed=3, gain=1.0)
        gonio.init_(other, init.orthogonal_, where="[046]", seed=3, gain=1.0)
        assert torch.equal(one[4].weight, other[4].weight)
        gonio.init_(other, init.orthogonal_, where="[046]", seed=4, gain=1.0)
        assert not torch.equal(one[4].weight, other[4].weight)

    def test_the_gain_follows_the_activation(self):
        model = network()
        table = str(gonio.init_(model, init.orthogonal_))
        assert "0  orthogonal_(gain=relu)" in table
        assert "4  orthogonal_(gain=tanh)" in table
        assert "6  orthogonal_(gain=linear)" in table

    def test_an_unknown_activation_is_said(self):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)

            def forward(self, x):
                return torch.sin(self.fc(x))

        edited = gonio.init_(Odd(), init.orthogonal_)
        assert "the function's own gain where the following activation is not known" in str(edited)
        assert "fc  orthogonal_()" in str(edited)

    def test_undo_brings_every_value_back(self):
        model = network()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        edited = gonio.init_(model, init.xavier_)
        assert not torch.equal(model[0].weight, before["0.weight"])
        assert torch.equal(model[0].bias, before["0.bias"])
        edited.undo_()
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    def test_a_failure_in_the_middle_leaves_all_as_it_was(self):
        model = network()
        before = {k: v.clone() for k, v in model.state_dict().items()}

        def fails_late(weight, *, layout, generator):
            weight.zero_()
            if weight.shape == (2, 8):
                weight.fill_(float("nan"))
            return weight

        with pytest.raises(NotApplicableError, match=r"fails_late was asked for '6'; it gave non-finite values"):
            gonio.init_(model, fails_late)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    def test_tied_weights_are_drawn_once(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        assert "1  tied: initialised above" in str(gonio.init_(model, init.orthogonal_))

    def test_options_are_checked_before_anything_happens(self):
        with pytest.raises(InvalidArgumentError, match=r"gian, which it does not take\. It takes .*gain"):
            gonio.init_(network(), init.orthogonal_, gian=2.0)

    def test_frozen_weights_stay_frozen(self):
        model = network()
        model[0].weight.requires_grad_(False)
        gonio.init_(model, init.orthogonal_, gain=1.0)
        assert not model[0].weight.requires_grad

    def test_a_layer_on_the_meta_device_is_refused(self):
        with pytest.raises(NoMatchError, match="on the meta device"):
            gonio.init_(nn.Linear(2, 2, device="meta"), init.orthogonal_)


class TestSwap:
    def test_the_parameters_are_the_same_objects(self):
        model = network()
        weight = model[0].weight
        gonio.swap_(model, gnn.DecoupledConv2d.from_conv)
        assert isinstance(model[0], gnn.DecoupledConv2d)
        assert model[0].weight is weight

    def test_twice_is_refused(self):
        model = network()
        gonio.swap_(model, gnn.DecoupledConv2d.from_conv)
        with pytest.raises(AlreadyAppliedError, match=r"swap_ was asked for '0'; found a DecoupledConv2d there"):
            gonio.swap_(model, gnn.DecoupledConv2d.from_conv)

    def test_a_layer_of_another_kind_is_refused(self):
        with pytest.raises(NoMatchError, match=r"4 \(it is a Linear, not a Conv2d\).*can act on: 0\."):
            gonio.swap_(network(), gnn.DecoupledConv2d.from_conv, where=nn.Linear)

    def test_the_model_itself_cannot_be_replaced(self):
        with pytest.raises(NotApplicableError, match=r"Wrap the model in nn\.Sequential"):
            gonio.swap_(nn.Conv2d(1, 1, 1), gnn.DecoupledConv2d.from_conv)

    def test_a_factory_that_fails_late_leaves_the_first_layers(self):
        model = network()
        first = model[4]

        def fails_on_the_second(linear: nn.Linear) -> nn.Module:
            if linear.out_features == 2:
                raise RuntimeError("second")
            return nn.Identity()

        with pytest.raises(RuntimeError, match="second"):
            gonio.swap_(model, fails_on_the_second)
        assert model[4] is first

    def test_the_mode_is_kept(self):
        model = network().eval()
        gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
        assert not model[1].training

    def test_the_optimizer_follows_and_returns(self):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(2, 3, 4, 4)).sum().backward()
        optimizer.step()
        groups = [list(group["params"]) for group in optimizer.param_groups]
        state = set(optimizer.state)
        edited = gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm, optimizer=optimizer)
        assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
        model(torch.randn(2, 3, 4, 4)).sum().backward()
        optimizer.step()
        edited.undo_()
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], groups[0], strict=True))
        assert set(optimizer.state) == state

    def test_an_optimizer_of_another_model_is_refused_and_nothing_changes(self):
        model = network()
        optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
        with pytest.raises(InvalidArgumentError, match="an optimizer that holds none of them"):
            gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm, optimizer=optimizer)
        assert type(model[1]) is nn.BatchNorm2d

    def test_hooks_that_stay_behind_are_said(self):
        model = network()
        model[0].register_forward_hook(lambda module, inputs, output: None)
        assert "its forward hooks stayed" in str(gonio.swap_(model, gnn.DecoupledConv2d.from_conv))


class TestParametrize:
    def test_parameters_keep_identity_and_order(self):
        model = network()
        before = list(model.parameters())
        gonio.parametrize_(model, P.Sphere())
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        norms = model[4].weight.norm(dim=1)
        torch.testing.assert_close(norms, torch.ones(8))

    def test_twice_is_refused(self):
        model = network()
        gonio.parametrize_(model, P.Sphere(), where="4")
        with pytest.raises(AlreadyAppliedError, match=r"asked for '4'; found Sphere on 'weight' there already"):
            gonio.parametrize_(model, P.Sphere(), where="4")

    def test_the_template_is_copied_for_each_layer(self):
        model = network()
        template = P.WeightNorm()
        gonio.parametrize_(model, template)
        found = [m for m in model.modules() if isinstance(m, P.Parametrization)]
        assert len({id(m) for m in found}) == 3
        assert template not in found

    def test_a_tie_to_an_unselected_layer_is_refused(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        with pytest.raises(NotApplicableError, match=r"it shares its weight with 1\.weight, which is not selected"):
            gonio.parametrize_(model, P.Sphere(), where="0")

    def test_tied_layers_stay_tied(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        gonio.parametrize_(model, P.Sphere())
        assert len(list(model.parameters())) == 3
        assert torch.equal(model[0].weight, model[1].weight)

    def test_added_parameters_reach_the_optimizer(self):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        edited = gonio.parametrize_(model, P.WeightNorm(), optimizer=optimizer)
        assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
        edited.undo_()
        assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}

    def test_a_vector_cannot_be_parametrized(self):
        with pytest.raises(NoMatchError, match="its weight is not a matrix"):
            gonio.parametrize_(network(), P.Sphere(), where=nn.BatchNorm2d)
