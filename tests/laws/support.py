"""What the laws have in common: seeded modules and inputs, gradients, comparison.

A law is a function `check_…(case)` that asserts one statement about one entry of the catalogue. Each
law file holds the check, the test that runs it over the catalogue, and a negative control: a member
broken on purpose that the check must refuse.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from catalog import LAYERS, PARAMETRIZATIONS, LayerCase, ParametrizationCase, seeded
from gonio import parametrizations as P
from tolerances import close

clone = copy.deepcopy
FULL = (torch.float32, torch.float64)
HALF = (torch.bfloat16, torch.float16)


def over(cases: Iterable[Any]) -> pytest.MarkDecorator:
    """Run a test once per case, under the case's name."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


def first_of_kind(cases: Iterable[Any]) -> list[Any]:
    """One case per member (the first word of a name), for laws whose check takes seconds."""
    kinds = {case.name.replace(",", " ").split()[0]: case for case in reversed(list(cases))}
    return list(reversed(kinds.values()))


def split_slow(cases: Sequence[Any]) -> pytest.MarkDecorator:
    """`over`, with all but the first case of each member marked as slow."""
    fast = {case.name for case in first_of_kind(cases) if not getattr(case, "long_to_compile", False)}
    marks = {True: (), False: (pytest.mark.slow,)}
    parameters = [pytest.param(case, id=case.name, marks=marks[case.name in fast]) for case in cases]
    return pytest.mark.parametrize("case", parameters)


def law(check: Callable[[Any], None], cases: Iterable[Any], *, by: Callable[..., pytest.MarkDecorator] = over) -> Any:
    """The test that runs a check over the catalogue."""

    @by(cases)
    def test(case: Any) -> None:
        check(case)

    return test


def law_by_dtype(
    check: Callable[..., None], cases: Iterable[Any], dtypes: tuple[torch.dtype, ...] = FULL + HALF
) -> Any:
    """As `law`, in each dtype; half precision where it is documented."""
    pairs = [(c, d) for d in dtypes for c in cases if d in FULL or getattr(c, "halves", True)]

    @pytest.mark.parametrize(("case", "dtype"), [pytest.param(c, d, id=f"{c.name}-{d}") for c, d in pairs])
    def test(case: Any, dtype: torch.dtype) -> None:
        check(case, dtype)

    return test


@dataclass(frozen=True, kw_only=True)
class ModuleCase:
    """A layer, or a torch layer that carries a parametrization: whatever a model holds."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    channels_last: bool = False
    couples_batch: bool = False
    halves: bool = True


def control(layer: Callable[..., nn.Module] = nn.Linear) -> ModuleCase:
    """A small layer that a law is to accept or, broken on purpose, to refuse."""
    return ModuleCase(name=layer.__name__, make=lambda: layer(4, 3), shape=(2, 4))


class Checkpointed(nn.Module):
    """Around a module whose activations are computed again in the backward pass."""

    def __init__(self, module: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.module = module
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


def perturbed(module: nn.Module, *, seed: int = 1) -> nn.Module:
    """Move every parameter off the special values (0, 1) that constructors choose; in place."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * seeded(*parameter.shape, seed=seed, dtype=parameter.dtype)
    return module


def input_shape(layer: nn.Module) -> tuple[int, ...]:
    """A small valid input for a torch layer."""
    if isinstance(layer, nn.Linear):
        return (4, layer.in_features)
    if isinstance(layer, nn.modules.conv._ConvNd):
        return (2, layer.in_channels, *(k + 3 for k in layer.kernel_size))
    raise TypeError(f"the laws know no input for {type(layer).__name__}; add it to laws/support.py")


def parametrized(case: ParametrizationCase, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The case's layer, in `dtype`, with its parametrization attached (state made in that precision)."""
    layer = perturbed(case.layer()).to(dtype)
    P.attach(layer, "weight", case.make())
    return layer


def _of_layer(case: LayerCase) -> ModuleCase:
    return ModuleCase(
        name=case.name,
        make=lambda: perturbed(case.make()),
        shape=case.shape,
        channels_last=case.channels_last,
        couples_batch=case.couples_batch,
        halves=case.halves,
    )


def _of_parametrization(case: ParametrizationCase) -> ModuleCase:
    shape = input_shape(case.layer())
    return ModuleCase(name=case.name, make=lambda: parametrized(case), shape=shape, channels_last=len(shape) == 4)


MODULES = [*map(_of_layer, LAYERS), *map(_of_parametrization, PARAMETRIZATIONS)]


def reloaded(value: Any, *, weights_only: bool = True) -> Any:
    """Through `torch.save` and `torch.load`."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def differentiate(output: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of a fixed random combination of `output` with respect to each tensor."""
    cotangent = seeded(*output.shape, seed=7, dtype=output.dtype).to(output.device)
    grads = torch.autograd.grad((output * cotangent).sum(), tensors, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, tensors, strict=True)]


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def run(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradient of the input and of each parameter, buffers; the module moves as a step moves it."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    output = module(x)
    grads = differentiate(output, [x, *trainable(module)])
    return [output.detach(), *grads, *(b.clone() for b in module.buffers())]


def assert_near(
    actual: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
    *,
    kind: Callable[[torch.dtype], dict[str, float]] = close,
    what: str = "value",
) -> None:
    """Equal within the tolerance of `dtype`; the absolute part grows with the largest entry."""
    limits = kind(dtype)
    actual, expected = actual.detach(), expected.detach()
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=limits["rtol"],
        atol=limits["atol"] * scale,
        msg=lambda text: f"{what} differs: {text}",
    )


def assert_all_equal(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    """Bit-equal, tensor by tensor."""
    assert len(actual) == len(expected), f"{what}: {len(actual)} tensors, expected {len(expected)}"
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, e), f"{what}: tensor {index} differs by {float((a - e).abs().max()):.3g}"


def assert_finite(tensors: Iterable[Tensor], what: str) -> None:
    for index, tensor in enumerate(tensors):
        assert bool(tensor.isfinite().all()), f"{what}: tensor {index} is not finite"


def global_states() -> dict[str, object]:
    numpy_state = np.random.get_state()[1].tobytes()  # noqa: NPY002  the legacy state is the one to watch
    return {"torch": torch.get_rng_state().tolist(), "random": random.getstate(), "numpy": numpy_state}
