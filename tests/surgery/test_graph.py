from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gonio.surgery import activation_after, followed_by_norm
from gonio.surgery.graph import trace


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.conv2(y) + x
        return self.fc(F.gelu(y).mean((2, 3)))


class Fork(nn.Module):
    """One output goes into a normalisation and past it."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        y = self.fc(x)
        return self.norm(y) + torch.relu(y)


class DataDependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else x


def test_a_layer_is_followed_by_a_norm_only_if_all_of_its_output_goes_there():
    assert followed_by_norm(Residual()) == {"conv1": "norm1"}
    assert followed_by_norm(Fork()) == {}


@pytest.mark.parametrize("between", [nn.Dropout(0.1), nn.Identity(), nn.Flatten()])
def test_layers_that_keep_scale_are_looked_through(between):
    assert followed_by_norm(nn.Sequential(nn.Linear(4, 4), between, nn.LayerNorm(4))) == {"0": "2"}


@pytest.mark.parametrize("between", [nn.ReLU(), nn.Linear(4, 4)])
def test_other_layers_are_not(between):
    assert "0" not in followed_by_norm(nn.Sequential(nn.Linear(4, 4), between, nn.LayerNorm(4)))


def test_the_first_activation_is_found_through_normalisation():
    assert activation_after(Residual()) == {"conv1": "relu", "fc": "linear"}  # conv2 meets a sum: unknown
    assert activation_after(Fork()) == {}
    chain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 1))
    assert activation_after(chain) == {"0": "tanh", "2": "silu", "4": "linear"}


def test_a_model_that_cannot_be_traced_says_why_and_gives_nothing():
    traced = trace(DataDependent())
    assert traced.nodes == ()
    assert "control flow" in traced.reason
    assert followed_by_norm(DataDependent()) == {} == activation_after(DataDependent())
