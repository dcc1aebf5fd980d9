from __future__ import annotations

import pytest
import torch
from torch import nn

import gonio
from gonio.errors import InvalidArgumentError
from gonio.surgery import equivalent


def test_equivalent_reports_both_deviations():
    a, b = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        a.weight.fill_(1.0)
        b.weight.fill_(1.5)
    found = gonio.surgery.equivalent(a, b, example=torch.ones(3, 2))
    assert (found.absolute, found.relative) == (1.0, 0.5)
    with pytest.raises(InvalidArgumentError, match="compares two models with outputs of the same shapes"):
        equivalent(a, nn.Linear(2, 2), example=torch.ones(3, 2))
    with pytest.raises(InvalidArgumentError, match="compares finite outputs"):
        equivalent(a, b, example=torch.full((3, 2), float("nan")))
