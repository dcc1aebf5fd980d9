from __future__ import annotations

import pytest
import torch
from torch import nn

from catalog import seeded
from gonio.errors import NoMatchError, NotApplicableError
from gonio.surgery import lsuv_


class Reversed(nn.Module):
    """Registered last to first."""

    def __init__(self):
        super().__init__()
        self.third, self.second, self.first = (
            nn.Linear(32, 4),
            nn.Conv1d(8, 8, 1),
            nn.Conv1d(3, 8, 3, padding=1),
        )

    def forward(self, x):
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))).flatten(1))


def stds(model, x, layers):
    found = {}
    handles = [
        layer.register_forward_hook(lambda _, __, y, name=name: found.__setitem__(name, float(y.detach().std())))
        for name, layer in layers.items()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return found


def test_every_layer_has_unit_variance_in_execution_order():
    model, x = Reversed(), seeded(64, 3, 4)
    edited = lsuv_(model, x)
    assert [change.path for change in edited.changes] == ["first", "second", "third"]
    for std in stds(model, x, dict(model.named_children())).values():
        assert std == pytest.approx(1, abs=0.011)


def test_a_dead_layer_is_reported_and_the_others_converge():
    class Dead(nn.Module):
        def __init__(self):
            super().__init__()
            self.live, self.dead = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.dead(0 * self.live(x))

    text = str(lsuv_(Dead(), seeded(16, 4)))
    assert "dead has not converged: its output is constant" in text
    assert "live  output std" in text


def test_non_finite_input_ends_and_is_reported():
    text = str(lsuv_(nn.Sequential(nn.Linear(4, 4)), torch.full((8, 4), float("nan"))))
    assert "0 has not converged: its output's std is nan" in text


def test_a_layer_that_does_not_run_is_left_and_said():
    model = nn.Sequential(nn.Linear(4, 4))
    model.unused = nn.Linear(4, 4)
    model.forward = lambda x: model[0](x)
    before = model.unused.weight.detach().clone()
    assert "unused did not run on the batch" in str(lsuv_(model, seeded(16, 4)))
    assert torch.equal(model.unused.weight, before)
    with pytest.raises(NotApplicableError, match="no selected layer ran"):
        lsuv_(model, seeded(16, 4), where="unused")


def test_undo_and_modes_and_buffers():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    edited = lsuv_(model, seeded(16, 4))
    assert model.training
    assert torch.equal(model[1].running_mean, state["1.running_mean"])
    edited.undo_()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_nothing_to_scale():
    with pytest.raises(NoMatchError, match="not a linear or convolutional layer"):
        lsuv_(nn.Sequential(nn.ReLU()), seeded(2, 2))


def test_a_lazy_layer_is_refused():
    with pytest.raises(NoMatchError, match="it is lazy; run one batch first"):
        lsuv_(nn.Sequential(nn.LazyLinear(3)), seeded(2, 3))


def test_a_tied_weight_is_scaled_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    assert "2  tied: scaled above" in str(lsuv_(model, seeded(64, 4)))
