"""`ConvOrthogonality` on the layers with 512 channels of a ResNet-18, in training steps.

One thread, 32 images of 32×32. The candidate computes the penalty and its gradient alone; "shifts" is the paper's
form, the convolution of the kernel with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Candidate, Operation, Row
from benchmarks.networks import ResNet18
from benchmarks.whole_steps import Network, plain, step_of
from gonio import regularizers as R
from gonio.geometry import layout_of

TITLE = "ConvOrthogonality on 512 channels"
FLOOR = "a training step of the ResNet-18: forward, backward and SGD with 32 images of 32×32"
LAYERS = ("stages.3.0.conv1", "stages.3.0.conv2", "stages.3.1.conv1", "stages.3.1.conv2")
# Of whole training steps: all four layers at once; none for a single layer.
GOALS = {("penalty", "all four layers", "FB"): "3.00"}


def shifts(conv: nn.Conv2d) -> Tensor:
    """The paper's form: ‖conv(K, K) − I‖ at every shift of the stride."""
    kernel, stride = conv.weight, conv.stride[0]
    padding = (kernel.shape[-1] - 1) // stride
    found = F.conv2d(kernel, kernel, stride=stride, padding=padding * stride)
    centre = torch.zeros_like(found)
    centre[:, :, padding, padding] = torch.eye(len(kernel))
    return (found - centre).norm()


def ours(conv: nn.Conv2d) -> Tensor:
    return R.ConvOrthogonality(1.0).value(conv.weight, layout_of(conv))


def _penalty(form: Callable[[nn.Conv2d], Tensor], width: int, names: Sequence[str]) -> Operation:
    torch.manual_seed(0)
    model = ResNet18(width)
    layers = [model.get_submodule(name) for name in names]
    weights = [layer.weight for layer in layers]
    return lambda: torch.autograd.grad(sum(form(layer) for layer in layers), weights)


def rows(*, quick: bool) -> Iterator[Row]:
    width, batch = (4, 2) if quick else (64, 32)
    network = Network(
        "ResNet-18", lambda: ResNet18(width), lambda draw: torch.randn(batch, 3, 32, 32, generator=draw), nn.Conv2d, 1
    )
    for case, names in {"all four layers": LAYERS, LAYERS[0]: LAYERS[:1], LAYERS[1]: LAYERS[1:2]}.items():
        forms = {"gonio": ours, "shifts": shifts} if len(names) == 1 else {"gonio": ours}
        candidates = [
            Candidate(name, lambda form=form, names=names: _penalty(form, width, names)) for name, form in forms.items()
        ]
        yield Row(case, "FB", Candidate("plain step", lambda: step_of(network, plain)), tuple(candidates), "penalty")
