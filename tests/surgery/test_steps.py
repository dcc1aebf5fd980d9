"""The one registry of optimizer steps: through every wrapper, in order, thread by thread, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import foreign
import gonio
from gonio import parametrizations as P
from gonio.editing.steps import differ, sum_of, watch
from gonio.editing.wrappers import real_optimizers
from gonio.errors import InvalidArgumentError, NotApplicableError

Optimizer = torch.optim.Optimizer


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Sam(Optimizer):
    """Sharpness-aware minimisation, whose two methods take the place of `step`."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base_optimizer, self.param_groups = base, base.param_groups
        self.moved: list[Any] = []

    @torch.no_grad()
    def first_step(self) -> None:
        self.moved = [(p, p.grad.clone()) for g in self.param_groups for p in g["params"]]
        for p, e in self.moved:
            p.add_(e)

    @torch.no_grad()
    def second_step(self) -> None:
        for p, e in self.moved:
            p.sub_(e)
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:
        self.first_step()
        self.second_step()


class Lookahead(Optimizer):
    """Every second step goes half of the way back; as in other libraries `Optimizer.__init__` is not called."""

    def __init__(self, base: Optimizer) -> None:
        self.inner, self.param_groups, self.state = base, base.param_groups, base.state
        self.slow = [p.detach().clone() for g in base.param_groups for p in g["params"]]
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        self.count += 1
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True) if self.count % 2 == 0 else ():
            slow.lerp_(p, 0.5)
            p.copy_(slow)


class Plain:
    """No Optimizer at all, with its optimizers in a dict."""

    def __init__(self, *inner: Optimizer) -> None:
        self.by_name = {str(i): each for i, each in enumerate(inner)}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.by_name.values() for group in each.param_groups]

    def step(self) -> None:
        for each in self.by_name.values():
            each.step()


class Deaf(Optimizer):
    """Neither calls `Optimizer.__init__` nor contains an optimizer: torch reports none of its steps."""

    def __init__(self, params: Any) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(params), "lr": 0.1}]
        self.state: dict[Any, Any] = {}

    def step(self, closure: Any = None) -> None: ...


def accelerated(optimizer: Optimizer) -> Any:
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(optimizer)


def lightning(optimizer: Optimizer) -> Any:
    foreign.torchvision()  # which the library imports where it finds it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer(optimizer)
    wrapped._strategy = type("Strategy", (), {"optimizer_step": lambda self, o, closure, **_: o.step(closure)})()
    return wrapped


def timms(optimizer: Optimizer) -> Any:
    foreign.timm()
    return importlib.import_module("timm.optim.lookahead").Lookahead(optimizer, k=2)


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "none": sgd,
    "accelerate": lambda m: accelerated(sgd(m)),
    "lightning": lambda m: lightning(sgd(m)),
    "Lookahead of timm": lambda m: timms(sgd(m)),
    "Lookahead": lambda m: Lookahead(sgd(m)),
    "SAM": lambda m: Sam(sgd(m)),
    "two in a dict": lambda m: Plain(sgd(m[0]), torch.optim.Adam(m[2].parameters(), lr=0.1)),
    "twice": lambda m: accelerated(Lookahead(sgd(m))),
}


def train(model: nn.Module, optimizer: Any, steps: int = 5) -> None:
    for seed in range(steps):
        model.zero_grad()
        x = torch.randn(9, 8, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        if isinstance(optimizer, Sam):
            optimizer.first_step()
            optimizer.second_step()
        else:
            optimizer.step()


def watches(optimizer: Any) -> list[Any]:
    return [each for real in real_optimizers(optimizer, verb="test") for each in vars(real).get("_gonio_watches", [])]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("step", ["free", "fixed"])
def test_weights_are_held_in_every_wrapper(wrapper: str, step: str) -> None:
    model = network()
    optimizer = WRAPPERS[wrapper](model)
    held = gonio.hold_(model, optimizer, step=step)
    norms = [layer.weight.detach().norm() for layer in (model[0], model[2])]
    before = model[0].weight.detach().clone()
    for _ in range(3):
        train(model, optimizer, 2)
        for layer, norm in zip((model[0], model[2]), norms, strict=True):
            assert float(layer.weight.detach().norm()) == pytest.approx(float(norm), rel=1e-6)
    assert not torch.allclose(model[0].weight, before)
    held.undo_()
    assert watches(optimizer) == []
    train(model, optimizer, 3)
    assert float(model[0].weight.detach().norm()) != pytest.approx(float(norms[0]), rel=1e-5), "a negative control"


@pytest.mark.parametrize("wrapper", ["Lookahead", "two in a dict"])
def test_the_end_of_a_hold_leaves_nothing_on_a_wrapper(wrapper: str) -> None:
    model = network()
    optimizer = WRAPPERS[wrapper](model)
    before = set(vars(optimizer))
    held = gonio.hold_(model, optimizer)
    second = watch(optimizer, settled=lambda _: None)
    held.undo_()
    second()
    assert set(vars(optimizer)) == before
    own, calls = optimizer.step, list[int]()
    optimizer.step = lambda: (calls.append(1), own())[1]
    gonio.hold_(model, optimizer).undo_()
    train(model, optimizer, 1)
    assert calls == [1], "a step that somebody else has set is called, and stays"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_of_a_wrapper_steps_itself(copied: Callable[[Any], Any]) -> None:
    model = network()
    optimizer = Plain(sgd(model))
    gonio.hold_(model, optimizer)
    other, twin = copied((model, optimizer))
    here, there = model[0].weight.detach().clone(), other[0].weight.detach().clone()
    train(other, twin, 1)
    assert torch.equal(model[0].weight, here)
    assert not torch.equal(other[0].weight, there)


def test_a_schedule_takes_a_held_wrapper() -> None:
    model = network()
    optimizer = Lookahead(sgd(model))
    norm = float(model[0].weight.detach().norm())
    gonio.hold_(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 2)
    schedule.step()
    train(model, optimizer, 2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert float(model[0].weight.detach().norm()) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_steps_are_measured_and_ticked_in_every_wrapper(wrapper: str) -> None:
    model = network()
    gonio.parametrize_(model, P.SpectralNorm(), where="0")
    optimizer = WRAPPERS[wrapper](model)
    ticking = P.tick_on_step(optimizer, model)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training")
    vector = model[0].weight_parametrization.v.clone()
    train(model, optimizer, 2)
    assert sorted((row["step"], row["layer"]) for row in tracker.rows) == [(1, "0"), (1, "2"), (2, "0"), (2, "2")]
    assert not torch.equal(model[0].weight_parametrization.v, vector)
    assert str(ticking).startswith("tick_on_step: 1 module\n  0  weight: SpectralNorm")
    ticking.undo_()
    tracker.undo_()
    assert watches(optimizer) == []


class Every(Plain):
    """Calls the optimizers in it every second time."""

    count = 0

    def step(self) -> None:
        self.count += 1
        if self.count % 2 == 0:
            super().step()


WHOLE: dict[str, Callable[[nn.Module], Any]] = {
    **WRAPPERS,
    "Lookahead around SAM": lambda m: Lookahead(Sam(sgd(m))),
    "one that calls no step": lambda m: Every(sgd(m)),
}


@pytest.mark.parametrize("wrapper", WHOLE)
@pytest.mark.parametrize("held", [False, True])
def test_the_update_that_is_measured_is_that_of_the_whole_wrapper(wrapper: str, held: bool) -> None:
    model = network()
    optimizer = WHOLE[wrapper](model)
    if held:
        gonio.hold_(model, optimizer)
    figures: dict[str, Any] = {"figures": "training", "also": ("gradient",)}
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, **figures)
    again = gonio.Tracker(model, optimizer=[*real_optimizers(optimizer, verb="test"), optimizer], every=1, **figures)
    updates = []
    for seed in range(4):
        x = torch.randn(9, 8, generator=torch.Generator().manual_seed(seed))
        model.zero_grad()
        model(x).square().mean().backward()
        before = [layer.weight.detach().clone() for layer in (model[0], model[2])]
        gradients = [float(layer.weight.grad.norm()) for layer in (model[0], model[2])]
        optimizer.step()
        for layer, w, gradient in zip((model[0], model[2]), before, gradients, strict=True):
            if not torch.equal(layer.weight, w):
                updates.append((float((layer.weight.detach() - w).norm() / w.norm()), gradient))
    steps = len(updates) // 2
    assert steps == (2 if "no step" in wrapper else 4)
    assert sorted({row["step"] for row in tracker.rows}) == [*range(1, steps + 1)]
    rows = sorted(tracker.rows, key=lambda row: (row["step"], row["layer"]))
    for row, (update, gradient) in zip(rows, updates, strict=True):
        assert row["relative_update"] == pytest.approx(update, rel=1e-5)
        assert row["gradient_norm"] == pytest.approx(gradient, rel=1e-5)
    assert again.rows == tracker.rows, "a wrapper that is given beside its optimizer counts once"


def test_a_wrapper_whose_class_zero_grad_patches_is_reported_all_the_same() -> None:
    class Fresh(Lookahead):  # torch patches a class once, at the first `zero_grad` of one that did not call __init__
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.inner.step(closure)
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)

    model = network()
    optimizer = Fresh(sgd(model))
    optimizer.defaults = optimizer.inner.defaults  # which zero_grad reads
    norm = float(model[0].weight.detach().norm())
    gonio.hold_(model, optimizer)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training", where="0")
    for row in range(3):
        optimizer.zero_grad()
        model(torch.randn(9, 8)).square().mean().backward()
        before = model[0].weight.detach().clone()
        optimizer.step()
        assert float(model[0].weight.detach().norm()) == pytest.approx(norm, rel=1e-6), "held after the slow step"
        update = float((model[0].weight.detach() - before).norm()) / norm
        assert tracker.rows[row]["relative_update"] == pytest.approx(update, rel=1e-5)


def test_a_step_that_an_exception_ends_is_not_counted() -> None:
    model = network()
    optimizer = Lookahead(sgd(model))
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training")

    def fails() -> float:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        optimizer.step(fails)
    with pytest.warns(gonio.errors.GonioWarning, match="the SGD made no step"):
        tracker.warn_if_empty()
    train(model, optimizer, 2)
    assert [row["step"] for row in tracker.rows] == [1, 1, 2, 2]


class Fails:
    """A wrapper that raises after the step of the optimizer in it, or before it."""

    def step(self, fails: str = "") -> None:
        if fails == "before":
            raise ValueError("no state")
        self.base_optimizer.step()
        if fails:
            raise ValueError("no state")


class OptimizerThatFails(Fails, Optimizer):
    """Torch reports its steps."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base_optimizer, self.param_groups = base, base.param_groups


class OtherThatFails(Fails):
    def __init__(self, base: Optimizer) -> None:
        self.base_optimizer, self.param_groups = base, base.param_groups


@pytest.mark.parametrize("wrapper", [OptimizerThatFails, OtherThatFails])
@pytest.mark.parametrize("fails", ["before", "after"])
@pytest.mark.parametrize("then", ["inner", "wrapper"])
def test_after_a_wrapper_failed_each_step_is_measured(wrapper: Any, fails: str, then: str) -> None:
    model = network()
    inner = sgd(model)
    optimizer = wrapper(inner)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training")
    model(torch.ones(2, 8)).square().sum().backward()
    with pytest.raises(ValueError, match="no state"):
        optimizer.step(fails)
    train(model, inner if then == "inner" else optimizer, 2)
    assert [row["step"] for row in tracker.rows] == [1, 1, 2, 2]
    tracker.undo_()
    assert "step" not in vars(optimizer)


def test_after_an_optimizer_failed_the_step_of_its_wrapper_is_measured_as_a_whole() -> None:
    model = network()
    inner = sgd(model)
    optimizer = Lookahead(inner)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training")
    train(model, optimizer, 1)
    with pytest.raises(ZeroDivisionError, match="by zero"):
        inner.step(lambda: 1 / 0)
    before = model[0].weight.detach().clone()
    train(model, optimizer, 1)  # the second one, which goes half of the way back
    update = float((model[0].weight.detach() - before).norm() / before.norm())
    assert tracker.rows[-2]["relative_update"] == pytest.approx(update, rel=1e-5)


class InTheBackwardPass(Optimizer):
    """As LOMO: hooks of the gradients change the weights, and the class has no `step`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for p in self.param_groups[0]["params"]:
            p.register_post_accumulate_grad_hook(lambda p: p.data.sub_(0.1 * p.grad))


@pytest.mark.parametrize(
    "act",
    [
        gonio.hold_,
        lambda m, o: gonio.Tracker(m, optimizer=o),
        lambda m, o: P.tick_on_step(o, gonio.parametrize_(m, P.SpectralNorm()) and m),
    ],
    ids=["hold_", "Tracker", "tick_on_step"],
)
@pytest.mark.parametrize(
    ("kind", "found"),
    [(Deaf, r"which neither calls .*"), (InTheBackwardPass, r"which has no step\(\) .* elsewhere, as in .*")],
)
def test_steps_that_cannot_be_observed_are_refused(act: Callable[..., Any], kind: Any, found: str) -> None:
    model = network()
    optimizer = kind(model.parameters())
    with pytest.raises(InvalidArgumentError, match=rf"can be observed; found an? .*{found} Pass the torch"):
        act(model, optimizer)
    assert "_gonio_watches" not in vars(optimizer)


class ScheduleFree(Optimizer):
    """Steps train y; `eval()` puts the average x in its place, as packages of this name do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None: ...

    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize("wrap", [lambda o: o, accelerated, Sam], ids=["none", "accelerate", "SAM"])
def test_weights_that_are_exchanged_for_an_average_are_neither_held_nor_clipped(wrap: Callable[[Any], Any]) -> None:
    model = network()
    averaging = wrap(ScheduleFree(model.parameters()))
    needs = (
        r"needs an optimizer whose steps change .*; found a ScheduleFree, whose eval\(\) replaces them by an average"
    )
    for act in (gonio.hold_, gonio.clip_qk_):
        with pytest.raises(InvalidArgumentError, match=f"{act.__name__} {needs}"):
            act(model, averaging)
    gonio.Tracker(model, optimizer=averaging)


class OwnGroups(Optimizer):
    """Sets the options of the optimizer in it by its own groups, as torch's ZeroRedundancyOptimizer."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.optim = torch.optim.SGD([{**group} for group in self.param_groups], **options)

    def step(self, closure: Any = None) -> None:
        for mine, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            inner.update({name: value for name, value in mine.items() if name != "params"})
        self.optim.step()


def test_a_wrapper_that_divides_the_parameters_over_processes_is_not_tracked_in_part() -> None:
    model = network()
    optimizer = OwnGroups(model.parameters(), lr=0.1)
    gonio.Tracker(model, optimizer=optimizer)
    del optimizer.optim.param_groups[0]["params"][:3]
    with pytest.raises(InvalidArgumentError, match="of one process; found an OwnGroups, 3 of whose parameters other"):
        gonio.Tracker(model, optimizer=optimizer)


@pytest.mark.parametrize("magnitude", [None, "learned"])
def test_a_wrapper_with_groups_of_its_own_holds_what_does_not_decay(magnitude: Any) -> None:
    model = network()
    for wrap in (lambda o: o, accelerated):
        decays = wrap(OwnGroups(model.parameters(), lr=0.1, weight_decay=0.01 if magnitude is None else 0.0))
        before = [dict(group) for group in decays.param_groups]
        with pytest.raises(NotApplicableError, match="OwnGroups has parameter groups beside those of the optimizer in"):
            gonio.hold_(model, decays, norm="filters", magnitude=magnitude)
        assert [dict(group) for group in decays.param_groups] == before
    optimizer = OwnGroups(model.parameters(), lr=0.1)
    norm = float(model[0].weight.detach().norm())
    gonio.hold_(model, optimizer)
    train(model, optimizer, 3)
    assert float(model[0].weight.detach().norm()) == pytest.approx(norm, rel=1e-6)


def test_an_inner_optimizer_of_other_parameters_is_none() -> None:
    """An attribute alone is no evidence: it must share parameters."""
    model, other = network(), network()
    optimizer = sgd(model)
    optimizer.reference = sgd(other)  # type: ignore[attr-defined]
    assert real_optimizers(optimizer, verb="test") == (optimizer,)


def test_order_before_and_after() -> None:
    """What measures is around what changes, whatever was registered first, and around the optimizer's own hooks."""
    model, seen = network(), list[str]()
    optimizer = sgd(model)

    def note(word: str) -> dict[str, Any]:
        return {"before": lambda _: seen.append(f"{word}+"), "after": lambda _: seen.append(f"{word}-")}

    ends = [watch(optimizer, **note("change")), watch(optimizer, **note("measure"), measures=True)]
    ends.append(watch(None, **note("all")))
    optimizer.register_step_pre_hook(lambda *_: seen.append("own+"))
    optimizer.register_step_post_hook(lambda *_: seen.append("own-"))
    optimizer.step()
    assert seen == ["all+", "measure+", "change+", "own+", "own-", "change-", "measure-", "all-"]
    for end in (*ends, *ends):
        end()
    seen.clear()
    optimizer.step()
    assert seen == ["own+", "own-"]


def test_a_watch_may_end_during_the_step() -> None:
    optimizer, seen = sgd(network()), list[int]()
    ends: list[Callable[[], None]] = []
    ends += [
        watch(optimizer, before=lambda _: [end() for end in ends]),
        watch(optimizer, after=lambda _: seen.append(1)),
    ]
    optimizer.step()
    optimizer.step()
    assert seen == []


def test_nothing_keeps_an_optimizer_or_a_model() -> None:
    model = network()
    optimizer = sgd(model)
    gonio.hold_(model, optimizer)
    gonio.Tracker(model, optimizer=optimizer)
    refs = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_threads_that_edit_hold_and_train() -> None:
    """Each its own model; the registry is the only thing that they share."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(30):
                model = network()
                optimizer = sgd(model)
                edited = gonio.parametrize_(model, P.WeightNorm(), where="2", optimizer=optimizer)
                held = gonio.hold_(model, optimizer, where="0")
                norm = float(model[0].weight.detach().norm())
                train(model, optimizer, 1)
                assert float(model[0].weight.detach().norm()) == pytest.approx(norm, rel=1e-6)
                held.undo_()
                edited.undo_()
                gonio.parametrize_(model, P.WeightNorm()).undo_()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_an_optimizer_whose_step_calls_another_is_as_it_was_after_the_last_watch() -> None:
    class Nested(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    gc.collect()  # penalties of other tests, which watch all optimizers
    model = nn.Linear(3, 2)
    held, other = Nested(model.parameters(), lr=0.1), Nested(nn.Linear(3, 2).parameters(), lr=0.1)
    before = set(vars(held)), set(vars(other))
    edit = gonio.hold_(model, held)
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
        held.step()
        other.step()
    assert "step" in vars(held)
    edit.undo_()
    assert set(vars(held)) == before[0]
    assert set(vars(other)) == before[1]  # of which no watch is


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8])
def test_a_small_change_of_many_entries_is_told_in_every_dtype(dtype: torch.dtype) -> None:
    """The sum of 1000 entries in bfloat16 is a multiple of 4."""
    weight = torch.ones(1000).to(dtype)
    before = sum_of(weight)
    weight[0] = 2
    assert differ(before, sum_of(weight))
    assert not differ(sum_of(weight), sum_of(weight.clone()))


def test_nan_is_no_change() -> None:
    weight = torch.full((3,), torch.nan)
    assert not differ(sum_of(weight), sum_of(weight))
