"""Decoupled layers in the ONNX exchange format: the same outputs, at another batch size too."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from catalog import seeded
from gonio import nn as gnn
from gonio.nn import angular, magnitude
from nn.operators import OPERATORS
from tolerances import exact

ASKED = "exports to ONNX and runs the result: install onnx, onnxscript and onnxruntime"
pytest.importorskip("onnx", reason=ASKED)
pytest.importorskip("onnxscript", reason=ASKED)
onnxruntime = pytest.importorskip("onnxruntime", reason=ASKED)


def exported(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The model in ONNX's own runtime, exported with a free batch size."""
    batch = torch.export.Dim("batch", min=2, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, about torch's internals
        program = torch.onnx.export(model, (x,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda y: torch.from_numpy(session.run(None, {name: y.numpy()})[0])


class _Beside(nn.Module):
    """Layers on the same input."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers])


def assert_same(model: nn.Module, *shape: int) -> None:
    model(seeded(*shape))  # moves the running norms off their initial values
    run = exported(model.eval(), seeded(*shape))
    for samples in (shape[0], 7):
        x = seeded(samples, *shape[1:], seed=samples)
        torch.testing.assert_close(run(x), model(x).detach(), **exact(torch.float32))


@pytest.mark.slow  # 50 layers in one graph
def test_every_operator_exports() -> None:
    assert_same(_Beside([gnn.DecoupledLinear(4, 3, **options) for options in OPERATORS]), 3, 4)


@pytest.mark.slow
def test_every_kind_of_layer_exports() -> None:
    assert_same(
        nn.Sequential(
            gnn.DecoupledConv2d(3, 8, 3, padding=1, stride=2, magnitude=magnitude.Tanh(learn_radius=True)),
            gnn.DecoupledConv2d(8, 8, 2, padding="same", padding_mode="reflect", groups=4, dilation=2),
            gnn.DecoupledConvTranspose2d(8, 4, 3, stride=2, groups=2, angular=angular.Sigmoid()),
            nn.Flatten(2),
            gnn.DecoupledConv1d(4, 6, 3, padding=1, padding_mode="circular", magnitude=magnitude.Mixed()),
            gnn.DecoupledConvTranspose1d(6, 4, 4, stride=3, weighted="linear"),
            nn.Unflatten(1, (2, 2, 1)),
            nn.Flatten(3),
            nn.Unflatten(3, (1, -1)),
            gnn.DecoupledConv3d(2, 4, (2, 1, 3), magnitude=magnitude.Sphere()),
            gnn.DecoupledConvTranspose3d(4, 2, 2, magnitude=magnitude.Ball()),
            nn.Flatten(),
        ),
        *(2, 3, 8, 8),
    )


def test_a_zero_image_exports() -> None:
    """What is defined at zero alone, by masks, is there as well."""
    layer = gnn.DecoupledConv2d(3, 4, 3, magnitude=magnitude.Sphere(), angular=angular.Linear()).eval()
    run = exported(layer, seeded(2, 3, 5, 5))
    black = torch.zeros(2, 3, 5, 5)
    torch.testing.assert_close(run(black), layer(black).detach())
