"""Whole networks: a ResNet-18 trained with each method folds to plain layers, and runs elsewhere with equal outputs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import gonio
from foreign import torchvision_resnet18
from gonio import nn as gnn
from gonio import parametrizations as P
from networks import ResNet18, images, train
from surgery.net import batch_only
from tolerances import exact

PARAMETRIZATIONS: dict[str, Callable[[], P.Parametrization]] = {
    "Sphere": P.Sphere,
    "WeightNorm": P.WeightNorm,
    "SpectralNorm": P.SpectralNorm,
    "SpectralNorm of conv": lambda: P.SpectralNorm(view="conv"),
    "Orthogonal": P.Orthogonal,
    "WeightStandardization": P.WeightStandardization,
    "scaled WeightStandardization": lambda: P.WeightStandardization(scale="fan_in", gain=1.7, learn_gain=True),
}
METHODS = [*PARAMETRIZATIONS, "SwitchableNorm"]
PLAIN = (nn.Conv2d, nn.BatchNorm2d, nn.Identity, nn.ReLU, nn.Linear, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Sequential)
X = images(4, seed=9)


def trained(method: str, make: Callable[[], nn.Module] = ResNet18) -> nn.Module:
    """A network that trained with a method on all its convolutions, or norms; the optimizer existed before."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if method == "SwitchableNorm":
        gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm, optimizer=optimizer)
    else:
        template = PARAMETRIZATIONS[method]()
        gonio.parametrize_(model, template, where=nn.Conv2d, optimizer=optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model, optimizer)
    assert all(torch.isfinite(torch.tensor(losses)))
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    # A norm follows, so the gradient of a filter's norm is rounding, and may be lost in the rounding of the norm.
    assert not [name for name in still if not name.endswith("magnitude")], "parts did not train"
    return model.eval()


def foldable_(model: nn.Module) -> nn.Module:
    """Give each switchable norm the mixture that a convolution can take in."""
    for module in model.modules():
        if isinstance(module, gnn.SwitchableNorm2d):
            batch_only(module)
    return model


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest output, as `gonio.equivalent` counts."""
    assert float((found - expected).abs().max() / expected.abs().max()) <= exact(torch.float32)["rtol"]


@pytest.mark.parametrize("method", METHODS)
def test_a_trained_network_folds_to_plain_layers(method: str) -> None:
    model = foldable_(trained(method))
    expected = model(X).detach()
    gonio.fold_(model, example=X)
    assert_equal(model(X).detach(), expected)
    assert_plain(model)


def assert_plain(model: nn.Module) -> None:
    """Layers of torch alone, and no norm."""
    kinds = {type(module) for module in model.modules()}
    assert {kind for kind in kinds if kind.__module__.startswith("gonio")} == set()
    assert nn.BatchNorm2d not in kinds
    assert kinds - set(PLAIN) <= {type(model), type(model.layer1[0])}


def run_elsewhere(model: nn.Module) -> Tensor:
    """The network's output from ONNX Runtime, for another batch size than it was exported with."""
    runtime: ModuleType = pytest.importorskip("onnxruntime", reason="ONNX Runtime runs what torch exports")
    pytest.importorskip("onnxscript", reason="torch's exporter to ONNX needs it")
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    program = torch.onnx.export(model, (images(2, seed=1),), dynamo=True, verbose=False, dynamic_shapes=shapes)
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    return torch.from_numpy(output)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")  # inside torch's exporter
@pytest.mark.parametrize("method", METHODS)
def test_a_folded_network_runs_in_onnx(method: str) -> None:
    model = foldable_(trained(method))
    gonio.fold_(model, example=X)
    assert_equal(run_elsewhere(model), model(X).detach())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")  # inside torch's exporter
def test_a_learned_mixture_runs_in_onnx() -> None:
    """It cannot be folded."""
    model = trained("SwitchableNorm")
    assert_equal(run_elsewhere(model), model(X).detach())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")  # inside torch's exporter
@pytest.mark.parametrize("method", [method for method in PARAMETRIZATIONS if method != "Orthogonal"])
def test_a_parametrized_network_runs_in_onnx(method: str) -> None:
    """Without folding. `Orthogonal` must be folded: ONNX has no decompositions of matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 4, 3, 2), nn.Flatten()).eval()
    gonio.parametrize_(model, PARAMETRIZATIONS[method]())
    assert_equal(run_elsewhere(model), model(X).detach())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")  # inside torch's exporter
@pytest.mark.parametrize("method", METHODS)
def test_a_network_of_full_size(method: str) -> None:
    """torchvision's ResNet-18: trained, folded to plain layers, run elsewhere."""
    model = foldable_(trained(method, lambda: torchvision_resnet18(10)))
    expected = model(X).detach()
    gonio.fold_(model, example=X)
    assert_plain(model)
    assert_equal(model(X).detach(), expected)
    assert_equal(run_elsewhere(model), expected)
