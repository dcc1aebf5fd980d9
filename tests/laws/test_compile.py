"""Law: torch.compile (one graph, once), torch.export and autocast give the eager result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from catalog import PARAMETRIZATIONS, REGULARIZERS, ParametrizationCase, RegularizerCase, seeded
from laws.support import (
    MODULES,
    ModuleCase,
    assert_finite,
    assert_near,
    clone,
    control,
    differentiate,
    law,
    over,
    parametrized,
    run,
    split_slow,
    trainable,
)
from tolerances import close, exact

CALLS = 3
# dynamo makes an instance of every autograd.Function that it traces, against which torch itself warns
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def check_compiled(case: ModuleCase, backend: str = "aot_eager") -> None:
    """Three training steps, compiled and eager: one graph, equal outputs, gradients and buffers."""
    eager = case.make()
    module = clone(eager)
    limits = exact if backend == "aot_eager" else close  # a code generator sums in another order
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for call in range(CALLS):
        x = seeded(*case.shape, seed=call)
        expected = run(eager, x)
        for index, (a, e) in enumerate(zip(run(compiled, x), expected, strict=True)):
            assert_near(a, e, torch.float32, kind=limits, what=f"call {call}, tensor {index}")
        _step(eager), _step(module)
        if call == 0:
            first = graphs()
    assert graphs() == first, f"{graphs() - first} recompilations after the first call"


def _step(module: nn.Module) -> None:
    """A step of an optimiser: parameters change in place, under their optimiser's hooks."""
    for index, parameter in enumerate(trainable(module)):
        parameter.grad = seeded(*parameter.shape, seed=index)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    optimizer.step()
    optimizer.zero_grad()


def check_compiled_regularizer(case: RegularizerCase) -> None:
    value = case.make().value
    compiled = torch.compile(value, fullgraph=True, backend="aot_eager")
    for call in range(CALLS):
        x = seeded(*case.shape, seed=call).requires_grad_()
        actual, expected = compiled(x), value(x)
        assert_near(actual, expected, torch.float32, kind=exact)
        grad = differentiate(actual, [x])[0]
        assert_near(grad, differentiate(expected, [x])[0], torch.float32, kind=exact, what="gradient")
        if call == 0:
            first = graphs()
    assert graphs() == first, f"{graphs() - first} recompilations after the first call"


def check_exported(case: ModuleCase) -> None:
    module = case.make().eval()
    x = seeded(*case.shape)
    program = torch.export.export(module, (x,))
    y = seeded(*case.shape, seed=5)
    assert_near(program.module()(y), module(y), torch.float32, kind=exact)


def check_autocast(case: ModuleCase) -> None:
    """bfloat16 autocast: near the full-precision output, float32 gradients, nothing non-finite."""
    module = case.make()
    x = seeded(*case.shape)
    expected = clone(module)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(x)
    assert_near(output, expected, torch.bfloat16)
    grads = differentiate(output, trainable(module))
    assert all(grad.dtype is torch.float32 for grad in grads), "a float32 weight got another gradient dtype"
    assert_finite(grads, "gradient under autocast")


def check_autocast_keeps(value: Tensor, expected: Tensor) -> None:
    assert_near(value, expected, torch.float32, what="value under autocast")


test_compile = pytest.mark.grid(2)(pytest.mark.matrix("compile")(law(check_compiled, MODULES, by=split_slow)))


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")  # a Fourier transform
@over([*MODULES[:1], *MODULES[-1:]])  # a layer and a parametrization: each costs the code generator's time
def test_inductor(case: ModuleCase) -> None:
    check_compiled(case, "inductor")


test_compile_regularizer = pytest.mark.matrix("compile")(law(check_compiled_regularizer, REGULARIZERS, by=split_slow))
test_export = pytest.mark.matrix("export")(law(check_exported, MODULES, by=split_slow))
test_autocast = pytest.mark.matrix("autocast")(law(check_autocast, [case for case in MODULES if case.halves]))


@pytest.mark.matrix("autocast")
@over(REGULARIZERS)
def test_autocast_keeps_the_precision_of_a_penalty(case: RegularizerCase) -> None:
    """Norms and Grams of float32 tensors are computed in float32: bfloat16 noise would be the signal."""
    x = seeded(*case.shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = case.make().value(x)
    check_autocast_keeps(value, case.make().value(x))


@pytest.mark.matrix("autocast")
@over(PARAMETRIZATIONS)
def test_autocast_keeps_the_precision_of_a_weight(case: ParametrizationCase) -> None:
    layer = parametrized(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weight = layer.weight
    check_autocast_keeps(weight, layer.weight)


# --- negative controls ----------------------------------------------------------------------------


class _Counting(nn.Linear):
    """A Python number in the graph: another value, another graph."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls > 2 else 2.0)


class _Breaking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_the_laws_accept_a_plain_linear_layer() -> None:
    case = control()
    check_compiled(case)
    check_exported(case)
    check_autocast(case)


def test_the_law_refuses_a_recompilation() -> None:
    with pytest.raises(AssertionError, match="recompilations after the first call"):
        check_compiled(control(_Counting))


def test_the_law_refuses_a_graph_break() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        check_compiled(control(_Breaking))


def test_the_law_refuses_a_gram_in_bfloat16() -> None:
    x = seeded(8, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gram = x @ x.T
    with pytest.raises(AssertionError, match="value under autocast differs"):
        check_autocast_keeps(gram, x @ x.T)
