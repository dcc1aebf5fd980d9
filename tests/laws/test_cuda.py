"""The laws with real tensors on a CUDA device: `make test-cuda`. Where there is none, one message says so.

The checks take a device, so a rehearsal on the CPU keeps those alive that do not need CUDA itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import REGULARIZERS, RegularizerCase, seeded
from gonio import parametrizations as P
from laws.elsewhere_work import WORK
from laws.settings import SUBJECTS, Subject, loss_of, step
from laws.support import (
    FULL,
    HALF,
    MODULES,
    ModuleCase,
    assert_finite,
    assert_near,
    clone,
    differentiate,
    first_of_kind,
    law,
    law_by_dtype,
    over,
    run,
    trainable,
)
from laws.test_elsewhere import assert_same
from tolerances import close

STEPS = 3


# --- checks on any device ---------------------------------------------------------------------------


def check_module(case: ModuleCase, dtype: torch.dtype, device: str) -> None:
    """Output, gradients and buffers of a step are those of the CPU in float64; in half precision the output is."""
    reference = case.make().double()
    module, x = clone(reference).to(device, dtype), seeded(*case.shape, dtype=dtype)
    found = run(module, x.to(device))
    assert {t.device.type for t in found} == {device}
    assert_finite(found, "output, gradients and buffers")
    expected = run(reference.to(dtype).double(), x.double())
    for index, (a, e) in enumerate(zip(found, expected, strict=True)):
        if index == 0 or dtype in FULL:  # gradients of few numbers in bfloat16 lose most digits
            assert_near(a.cpu(), e, dtype, what=f"tensor {index}")


def check_regularizer(case: RegularizerCase, dtype: torch.dtype, device: str) -> None:
    x = seeded(*case.shape, dtype=dtype)
    point, reference = (x.to(device).requires_grad_(), x.double().requires_grad_())
    value, expected = case.make().value(point), case.make().value(reference)
    assert_near(value.cpu(), expected, dtype)
    grad, expected = differentiate(value, [point])[0], differentiate(expected, [reference])[0]
    assert_near(grad.cpu(), expected, dtype, what="gradient")


def check_amp(case: ModuleCase, dtype: torch.dtype, device: str) -> None:
    """Autocast with a gradient scaler: near the full-precision step, float32 gradients, nothing non-finite."""
    module, x = case.make().to(device), seeded(*case.shape).to(device)
    expected = clone(module)(x)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=256.0, enabled=dtype is torch.float16)
    with torch.autocast(device, dtype=dtype):
        output = module(x)
    assert_near(output, expected, torch.bfloat16)
    scaler.scale(loss_of(output.float())).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in module.parameters())
    assert_finite(module.state_dict().values(), "state after a step")


def check_training(subject: Subject, device: str) -> None:
    """Steps with a penalty and ticks of singular vectors; the state is that of the CPU."""
    states = []
    for where in ("cpu", device):
        model, x = subject.model().to(where), subject.x().to(where)
        penalty = subject.penalty(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(STEPS):
            step(model, x, penalty, optimizer)
            P.tick_(model)
        states.append(model.state_dict())
    for name, expected in states[0].items():
        assert_near(states[1][name].cpu(), expected, torch.float32, what=name)


@over(first_of_kind(MODULES))
def test_rehearsal_of_modules(case: ModuleCase) -> None:
    check_module(case, torch.float64, "cpu")
    check_amp(case, torch.bfloat16, "cpu")


@over(first_of_kind(REGULARIZERS))
def test_rehearsal_of_regularizers(case: RegularizerCase) -> None:
    check_regularizer(case, torch.float32, "cpu")


@over(SUBJECTS)
def test_rehearsal_of_trainings(case: Subject) -> None:
    check_training(case, "cpu")


# --- on CUDA ----------------------------------------------------------------------------------------


@pytest.fixture
def device() -> Iterator[str]:
    """The CUDA device, with products in full float32; waiting for it in a step is an error where a test says so."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device: the laws on real accelerators were not run")
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield "cuda"
    torch.backends.cudnn.allow_tf32 = before
    torch.cuda.set_sync_debug_mode("default")


# torch's own remarks on CUDA: on its speed, and on its watch for waiting
_REMARKS = (
    "TensorFloat32 tensor cores",
    r"\nOnline softmax is disabled",
    "Synchronization debug mode is a prototype",
    "The AccumulateGrad node's stream does not match",
)


def marked(test: Callable[..., None]) -> Callable[..., None]:
    quiet = pytest.mark.filterwarnings(*(f"ignore:{remark}:UserWarning" for remark in _REMARKS))
    return pytest.mark.cuda(pytest.mark.usefixtures("device")(quiet(test)))


def waits(module: nn.Module) -> bool:
    """Whether a layer needs eigenvectors: `torch.linalg.eigh` waits for the device, and no graph can hold it."""
    return any(isinstance(each, (P.Orthogonal, P.OrthogonalConv)) for each in module.modules())


test_module = marked(law_by_dtype(partial(check_module, device="cuda"), MODULES))
test_regularizer = marked(law_by_dtype(partial(check_regularizer, device="cuda"), REGULARIZERS))
test_amp = marked(law_by_dtype(partial(check_amp, device="cuda"), MODULES, HALF))
test_training = marked(law(partial(check_training, device="cuda"), SUBJECTS))


@marked
@over(SUBJECTS)
def test_no_step_waits_for_the_device(case: Subject) -> None:
    """As the law of the fake accelerator, with torch's own watch; a layer that needs eigenvectors does wait."""
    model, x = case.model().to("cuda"), case.x().to("cuda")
    penalty = case.penalty(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step(model, x, penalty, optimizer)  # tables are made once
    P.tick_(model)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation") if waits(model) else nullcontext():
        step(model, x, penalty, optimizer)
        P.tick_(model)


@marked
@over(first_of_kind(MODULES))
def test_inductor(case: ModuleCase) -> None:
    torch._dynamo.reset()  # else the sizes of another case with the same class become symbols
    eager = case.make().to("cuda")
    module = clone(eager)
    compiled = torch.compile(module, fullgraph=True)
    for call in range(STEPS):
        x = seeded(*case.shape, seed=call).to("cuda")
        for a, e in zip(run(compiled, x), run(eager, x), strict=True):
            assert_near(a, e, torch.float32, kind=close)


@marked
@over(first_of_kind(MODULES))
def test_on_a_stream_of_its_own(case: ModuleCase) -> None:
    module, x = case.make().to("cuda"), seeded(*case.shape).to("cuda")
    expected = run(clone(module), x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = run(module, x)
    torch.cuda.current_stream().wait_stream(stream)
    for a, e in zip(found, expected, strict=True):
        assert_near(a, e, torch.float32)


@marked
@over([case for case in first_of_kind(MODULES) if not waits(case.make())])
def test_in_a_cuda_graph(case: ModuleCase) -> None:
    """A captured training step of a layer, replayed on another input."""
    module, x = case.make().to("cuda"), seeded(*case.shape).to("cuda").requires_grad_()
    eager = clone(module)
    graphed = torch.cuda.make_graphed_callables(clone(module), (x,))
    y = seeded(*case.shape, seed=5).to("cuda")
    # the warm-up moves running statistics, so outputs in training that do not read them are compared
    expected, found = eager(y), graphed(y)
    assert_near(found, expected, torch.float32)
    for a, e in zip(
        differentiate_on(found, trainable(graphed)), differentiate_on(expected, trainable(eager)), strict=True
    ):
        assert_near(a, e, torch.float32, what="gradient")


def differentiate_on(output: Tensor, tensors: list[nn.Parameter]) -> list[Tensor]:
    grads = torch.autograd.grad(loss_of(output), tensors, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, tensors, strict=True)]


@marked
def test_a_measurement_and_a_tracker() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    expected = gonio.measure(model).to_dict()
    found = gonio.measure(model.to("cuda")).to_dict()
    assert expected.keys() == found.keys()
    gonio.Tracker(model).step(0)


@marked
@pytest.mark.parametrize("name", WORK)
def test_verbs_measurements_and_runs(name: str) -> None:
    """What the law of the second device compares, with a real one."""
    assert_same(WORK[name]("cpu"), WORK[name]("cuda"), name)
