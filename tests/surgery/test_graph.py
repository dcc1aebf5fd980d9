"""The traced graph: what it answers, and that tracing leaves nothing behind."""

from __future__ import annotations

import copy
import re
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from catalog import seeded
from gonio.errors import NotApplicableError
from gonio.nn.conversion import computes_as
from gonio.surgery import activation_after, balance_, followed_by_norm
from gonio.surgery.facts import facts_of
from gonio.surgery.graph import trace
from surgery.net import Net


def residual() -> Net:
    def forward(m, x):
        y = F.relu(m.norm1(m.conv1(x)))
        return m.fc(F.gelu(m.conv2(y) + x).mean((2, 3)))

    conv1, conv2 = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
    return Net(forward, conv1=conv1, norm1=nn.BatchNorm2d(4), conv2=conv2, fc=nn.Linear(4, 2))


def fork() -> Net:
    """One output goes into a normalisation and past it."""

    def forward(m, x):
        y = m.fc(x)
        return m.norm(y) + torch.relu(y)

    return Net(forward, fc=nn.Linear(4, 4), norm=nn.LayerNorm(4))


def test_a_layer_is_followed_by_a_norm_only_if_all_of_its_output_goes_there():
    assert followed_by_norm(residual()) == {"conv1": "norm1"}
    assert followed_by_norm(fork()) == {}


def test_the_first_activation_is_found_through_normalisation():
    assert activation_after(residual()) == {"conv1": "relu", "fc": "linear"}  # conv2 meets a sum: unknown
    assert activation_after(fork()) == {}
    chain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 1))
    assert activation_after(chain) == {"0": "tanh", "2": "silu", "4": "linear"}


def test_a_model_that_cannot_be_traced_says_why_and_gives_nothing():
    model = Net(lambda m, x: x if x.sum() > 0 else -x)
    traced = trace(model)
    assert traced.nodes == ()
    assert "control flow" in traced.reason
    assert followed_by_norm(model) == {} == activation_after(model)


@pytest.mark.parametrize(
    ("between", "passed"),
    [
        (nn.Dropout(0.1), True),
        (nn.Identity(), True),
        (nn.Flatten(), True),
        (nn.ReLU(), False),
        (nn.Linear(4, 4), False),
    ],
)
def test_only_layers_that_keep_scale_are_passed(between: nn.Module, passed: bool) -> None:
    assert ("0" in followed_by_norm(nn.Sequential(nn.Linear(4, 4), between, nn.LayerNorm(4)))) == passed


def test_scale_has_no_effect_directly_before_a_norm_that_removes_the_bias_too():
    """Stricter than `norm_after`: nothing between, and a bias only before a norm of each channel."""
    layers = [nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)]
    layers += [nn.Conv2d(4, 4, 1, bias=False), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1), nn.Dropout(), nn.BatchNorm2d(4)]
    graph = trace(nn.Sequential(*layers))
    assert graph.scale_invariant == {"0", "4"}
    assert graph.norm_after == {"0": "1", "2": "3", "4": "5", "6": "8"}


def test_calls_are_counted_in_the_order_of_execution():
    model = Net(lambda m, x: m.last(m.first(m.first(x))), last=nn.Linear(2, 2), first=nn.Linear(2, 2))
    graph = trace(model)
    assert [path for path, _, _ in graph.calls()] == ["first", "first", "last"]
    assert graph.call_counts == {"first": 2, "last": 1}


class Masked(nn.Module):
    """A branch that a plain call takes, and that a proxy in the place of None would not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, mask=None, *, scale: float = 1.0, shape=(2, 2), **rest):
        y = self.a(x)
        if mask is None:
            y = torch.sigmoid(y)
        if scale != 1.0:
            y = y * scale
        return self.b(F.relu(y))


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last, self.count = nn.Linear(4, 4), None, 0

    def forward(self, x):
        self.last, self.count = self.fc(x), self.count + 1
        self.seen = True
        return F.relu(self.last) + torch.rand(1)


class Standardised(nn.Linear):
    """Its weight's scale has no effect."""

    def forward(self, x):
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, weight / weight.std(1, keepdim=True), self.bias)


def test_arguments_keep_their_defaults() -> None:
    with pytest.raises(NotApplicableError, match=r"sigmoid \(sigmoid\) is not known to be positively homogeneous"):
        balance_(Masked())
    assert activation_after(Masked())["a"] == "sigmoid"


def test_what_training_does_otherwise_pins_the_scale() -> None:
    """In training a second head reads the hidden tensor through a tanh."""

    def forward(m, x):
        y = F.relu(m.a(x))
        return (m.b(y), m.aux(torch.tanh(y))) if m.training else m.b(y)

    model = Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2), aux=nn.Linear(4, 2)).eval()
    with pytest.raises(NotApplicableError, match="it is used differently in training and in evaluation"):
        balance_(model)
    assert not model.training


class Failing(Remembering):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y


@pytest.mark.parametrize(("make", "reason"), [(Remembering, "^$"), (Failing, "control flow")])
def test_nothing_is_left_behind(make: type[nn.Module], reason: str) -> None:
    model, random = make(), torch.random.get_rng_state()
    before = copy.copy(vars(model))
    assert re.search(reason, trace(model, training=False).reason)
    assert vars(model) == before
    assert torch.equal(torch.random.get_rng_state(), random)


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel])
def test_wrappers_are_looked_through(wrap) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert activation_after(wrap(model)) == activation_after(model) == {"0": "relu", "2": "linear"}


def test_a_subclass_with_a_forward_of_its_own_is_not_taken_for_the_layer() -> None:
    assert not computes_as(Standardised(2, 2), (nn.Linear,))
    hooked = nn.Linear(2, 2)
    hooked.forward = lambda x: x
    assert not computes_as(hooked, (nn.Linear,))
    model = nn.Sequential(Standardised(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(NotApplicableError, match="0 is a Standardised"):
        balance_(model)


def test_a_layer_that_runs_twice_counts_with_both_of_its_outputs() -> None:
    model = Net(lambda m, x: m.norm(m.fc(F.relu(m.fc(x)))), fc=nn.Linear(4, 4), norm=nn.LayerNorm(4))
    assert followed_by_norm(model) == {} == activation_after(model)


def test_frozen_and_local_norms_do_not_take_scale_away() -> None:
    class FrozenBatchNorm2d(nn.Module):
        def forward(self, x):
            return 2 * x + 1

    assert not facts_of(FrozenBatchNorm2d()).removes_scale
    assert not facts_of(nn.LocalResponseNorm(2)).removes_scale
    assert facts_of(nn.RMSNorm(4)).removes_scale


def test_positions_must_all_be_averaged() -> None:
    """A mean over two of three positions leaves channels that are not the last dimension."""
    model = Net(lambda m, x: m.fc(F.relu(m.conv(x)).mean((-1, -2))), conv=nn.Conv3d(1, 4, 1), fc=nn.Linear(4, 2))
    with pytest.raises(NotApplicableError, match=r"mean .* is not known to be positively homogeneous"):
        balance_(model)


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
def test_pooling_functions_let_scale_pass(pool) -> None:
    model = Net(lambda m, x: m.b(pool(F.relu(m.a(x)), 2)), a=nn.Conv2d(1, 3, 1), b=nn.Conv2d(3, 1, 1)).double()
    assert "largest deviation" in str(balance_(model, example=seeded(2, 1, 4, 4, dtype=torch.float64)))


def test_tracing_in_one_thread_leaves_the_calls_of_others_alone() -> None:
    """torch.fx replaces `nn.Module.__call__` for the whole process while it traces."""
    model, other = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)]), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x, calls, failures, done = seeded(2, 4), 0, [], threading.Event()
    expected = other(x).detach()

    def forwards() -> None:
        nonlocal calls
        while not done.is_set():
            try:
                assert torch.equal(other(x), expected)
            except Exception as error:
                failures.append(error)
            calls += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=forwards)
    thread.start()
    try:
        reasons = [trace(model).reason for _ in range(10)]
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert (calls > 10, failures) == (True, [])
    assert reasons == [""] * 10


def test_threads_may_trace_at_the_same_time() -> None:
    models = [nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)]) for _ in range(4)]
    reasons: list[str] = []
    threads = [threading.Thread(target=lambda m=model: reasons.append(trace(m).reason)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reasons == [""] * 4


def test_a_method_that_is_set_on_a_convolution_is_another_forward() -> None:
    conv = nn.Conv2d(1, 2, 3)
    assert computes_as(conv, (nn.Conv2d,))
    plain = conv._conv_forward
    conv._conv_forward = lambda *given: 2 * plain(*given)
    assert not computes_as(conv, (nn.Conv2d,))
