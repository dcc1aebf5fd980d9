"""A twin: other modules that share the parameters of a model, so that what runs it leaves the model alone."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial, wraps

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import gonio
from gonio.editing.twin import copy_of, evaluating, set_tensors_, twin_of
from gonio.measuring.figures.signals import Gradient

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    features = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(4 * 36, 5))


class Referring(nn.Module):
    """Refers to its own parts in every way that an attribute can."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.inside = nn.ModuleList([nn.Dropout(0.5)])
        self.listed = [self.drop]
        self.named = {"drop": self.drop}
        self.bound = self.drop.forward
        self.called = partial(nn.Module.__call__, self.drop)
        self.weakly = weakref.ref(self.drop)
        drop = self.drop
        self.closed = lambda x: drop(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in (self.listed[0], self.named["drop"], self.bound, self.called, self.weakly(), self.closed):
            x = each(x)
        return self.inside[0](x)


def test_parameters_are_shared_and_modules_and_buffers_are_not() -> None:
    model = network()
    twin = twin_of(model)
    assert [id(p) for p in twin.parameters()] == [id(p) for p in model.parameters()]
    assert not {id(b) for b in twin.buffers()} & {id(b) for b in model.buffers()}
    assert all(torch.equal(a, b) for a, b in zip(twin.buffers(), model.buffers(), strict=True))
    assert not {id(m) for m in twin.modules()} & {id(m) for m in model.modules()}
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]


def test_references_lead_to_twins() -> None:
    model = Referring()
    with evaluating(model) as twin:
        assert torch.equal(twin(X), X)  # no dropout anywhere
    assert all(module.training for module in model.modules())


def test_a_module_that_occurs_twice_is_one_twin() -> None:
    layer = nn.Linear(2, 2)
    twin = twin_of(nn.Sequential(layer, nn.ReLU(), layer))
    assert twin[0] is twin[2]


def test_hooks_run_and_hooks_of_the_twin_stay_there() -> None:
    model, seen = network(), []
    model[0].register_forward_hook(lambda *_: seen.append("model"))
    twin = twin_of(model).eval()
    twin[0].register_forward_hook(lambda *_: seen.append("twin"))
    twin(X)
    model(X)
    assert seen == ["model", "twin", "model"]


def test_other_tensors_stay_in_the_twin() -> None:
    model = nn.GRU(3, 4)
    before = [p.clone() for p in model.parameters()]
    twin = twin_of(model)
    set_tensors_(twin, {id(p): nn.Parameter(torch.zeros_like(p)) for p in model.parameters()})
    assert not twin(torch.ones(1, 2, 3))[0].any()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_compiled_parts_run_eagerly() -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("compiled")

    inner = network()
    model = nn.Sequential(torch.compile(inner, backend=refuse))
    inner[0].compile(backend=refuse)
    with evaluating(model) as twin:
        assert twin(X).shape == (4, 5)


def test_a_scripted_module_keeps_its_mode() -> None:
    model = nn.Sequential(torch.jit.script(nn.Dropout(0.5)))
    with evaluating(model) as twin:
        assert torch.equal(twin(X), X)
    assert model[0].training


class Calling:
    """An object that is called, and refers to what it calls."""

    def __init__(self, called: Callable[[Tensor], Tensor]) -> None:
        self.called = [called]

    def __call__(self, x: Tensor) -> Tensor:
        return self.called[0](x)


def by_closure(own: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(x: Tensor, *, times: int = 1) -> Tensor:
        return times * own(x)

    return forward


def by_itself(own: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(x: Tensor, calls: int = 2) -> Tensor:
        return forward(x, calls - 1) if calls else own(x)

    return forward


def by_name(own: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    namespace = {"own": own}
    exec("def inner(x):\n    return own(x)\ndef forward(x):\n    return inner(x)", namespace)
    return namespace["forward"]


WAYS = {
    "closure": by_closure,
    "default": lambda own: lambda x, own=own: own(x),
    "list in a closure": lambda own: (lambda held: lambda x: held[0](x))([own]),
    "keyword default": lambda own: partial(by_keyword(own)),
    "global name": by_name,
    "itself": by_itself,
    "object": Calling,
    "method of an object": lambda own: Calling(own).__call__,
    "wrapper": lambda own: wraps(own)(lambda *given: own(*given)),
    "partial of a closure": lambda own: partial(by_closure(own), times=1),
}


def by_keyword(own: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(x: Tensor, *, own: Callable[[Tensor], Tensor] = own) -> Tensor:
        return own(x)

    return forward


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", [gonio.measure, lambda m, batch: gonio.doctor(m, batch=batch).before])
def test_a_forward_that_was_replaced_is_that_of_the_twin(way: str, verb: Callable[..., gonio.Measurements]) -> None:
    plain, model = network(), network()
    model.forward = WAYS[way](model.forward)
    before = copy.deepcopy(model.state_dict())
    found = verb(model, batch=X)
    assert [signal.rms for signal in found.signals] == [signal.rms for signal in verb(plain, batch=X).signals]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_runs_its_own_modules(way: str) -> None:
    model = network()
    model.forward = WAYS[way](model.forward)
    made = copy_of(model.eval())
    assert torch.equal(made(X), model(X))
    with torch.no_grad():
        made[5].weight.zero_()
        made[5].bias.zero_()
    assert not made(X).any()
    assert model(X).any()


def test_a_hook_that_names_a_layer_globally_is_that_of_the_twin() -> None:
    model = network()
    namespace = {"first": [model[1]]}
    exec("def hook(module, inputs, output):\n    first[0](inputs[0].new_zeros(2, 4, 1, 1))", namespace)
    model[2].register_forward_hook(namespace["hook"])
    gonio.measure(model, batch=X)
    assert int(model[1].num_batches_tracked) == 0


@pytest.mark.parametrize("verb", [gonio.measure, gonio.doctor])
def test_a_forward_that_no_copy_takes_over_is_refused(verb: Callable[..., object]) -> None:
    model = network()
    model.forward = cache(model.forward)
    with pytest.raises(gonio.errors.NotApplicableError, match=r"cannot leave alone layer '0' \(Conv2d\)"):
        verb(model, batch=X)
    assert int(model[1].num_batches_tracked) == 0


def test_an_attribute_that_cannot_be_copied_is_shared() -> None:
    model = network()
    model.lock, model[0].numbers = threading.Lock(), (number for number in range(3))
    made = copy_of(model)
    assert made.lock is model.lock
    assert made[0].numbers is model[0].numbers
    assert made[0].weight is not model[0].weight
    assert gonio.doctor(model, batch=X).before.signals


def test_weights_that_a_verb_changes_under_autocast_are_seen() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    with torch.no_grad():
        for tensor, factor in ((model[0].weight, 1024), (model[0].bias, 1024), (model[2].weight, 1 / 1024)):
            tensor.mul_(factor)
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_cache_enabled()
        treated = gonio.doctor(model, batch=x)
        assert torch.is_autocast_cache_enabled()
    assert [finding.code for finding in treated.before.findings] == ["G409"]
    assert max(signal.gain or 0 for signal in gonio.measure(treated.model, batch=x).signals) < 30 or not treated.kept
    assert "the findings remain" not in treated.steps[-1].proof


def test_nothing_is_kept_of_what_was_run() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    treated = gonio.doctor(model, batch=x)
    copied = [weakref.ref(each) for each in (*treated.model.modules(), *treated.model.parameters())]
    del treated
    gonio.measure(model, batch=x)
    gc.collect()
    assert [each() for each in copied] == [None] * len(copied)
    assert [each for each in gc.get_objects() if type(each) is Gradient] == []


class Counting(nn.Module):
    """Counts its calls in a buffer in every mode, and refers to the buffer by an attribute as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.register_buffer("calls", torch.zeros(()))
        self.same = [self.calls]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.same[0].add_(1)
        return self.body(x)


class Looping(Counting):
    """Cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > -1e9 else 2 * x)


READING = {
    "measure": lambda m: gonio.measure(m),
    "measure with a batch": lambda m: gonio.measure(m, batch=X),
    "certify": lambda m: gonio.certify(m, example=X),
    "equivalent": lambda m: gonio.equivalent(m, m, example=X),
    "param_groups": lambda m: gonio.param_groups(m, matrices=True),
    "trace": lambda m: gonio.surgery.graph.trace(m),
    "running": lambda m: run_twice(m),
}


def run_twice(model: nn.Module) -> None:
    with evaluating(model) as twin:
        twin(X)
        assert float(twin(X).shape[0]) == len(X)
        assert float(twin.calls) == 4


@pytest.mark.parametrize("kind", [Counting, Looping])
@pytest.mark.parametrize("verb", READING)
def test_no_reading_verb_changes_a_buffer(verb: str, kind: type[Counting]) -> None:
    model = kind().eval()
    own, before = list(model.buffers()), [b.clone() for b in model.buffers()]
    with suppress(gonio.errors.GonioError):  # no certificate without a graph
        READING[verb](model)
    assert all(a is b for a, b in zip(own, model.buffers(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    model(X)
    assert float(model.calls) == 2


def test_a_model_that_runs_itself_gets_its_buffers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counting()
    namespace = {"model": model, "torch": torch}
    exec("def forward(x):\n    model.calls += 1\n    model.calls = model.calls + 1\n    return x", namespace)
    model.forward = namespace["forward"]
    own = model.calls
    monkeypatch.setattr("gonio.editing.twin.is_sharded", lambda model: True)
    with evaluating(model) as same:
        assert same is model
        model(X)
        assert float(model.calls) == 2
    assert model.calls is own
    assert float(own) == 0


@pytest.mark.filterwarnings("error")
def test_measuring_beside_training_and_serving() -> None:
    """Another thread's steps see training mode, and predictions stay the same."""
    trained, served = network(), network().eval()
    expected = served(X).detach()
    stop, wrong = threading.Event(), []

    def use() -> None:
        while not stop.is_set():
            wrong.extend("mode" for m in trained.modules() if not m.training)
            if not torch.equal(served(X), expected):
                wrong.append("prediction")

    thread = threading.Thread(target=use)
    thread.start()
    for _ in range(3):
        gonio.measure(trained)
        gonio.measure(served, batch=X)
    stop.set()
    thread.join()
    assert not wrong


def test_threads_that_measure_one_model_see_the_same() -> None:
    model = network()
    model[0].requires_grad_(False)
    expected = gonio.measure(model, batch=X).to_dict()["signals"]
    found = []
    threads = [threading.Thread(target=lambda: found.append(gonio.measure(model, batch=X))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.to_dict()["signals"] for each in found] == [expected] * 3
    assert not model[0].weight.requires_grad


class Remembering(nn.Module):
    """Stores what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen: dict[str, list[torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["outputs"] = [x * self.weight]
        return self.seen["outputs"][0]


def old_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(3, 3))


@pytest.mark.parametrize(
    "make",
    [old_norm, lambda: prune.l1_unstructured(nn.Linear(3, 3), "weight", 2), Remembering],
    ids=["old norm", "pruned", "remembering"],
)
def test_models_with_computed_attributes_are_copied_and_treated(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.ReLU(), nn.Linear(3, 2))
    x = torch.randn(5, 3)
    expected = model(x)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model)
    twin = copy_of(model)
    assert torch.equal(twin(x), expected)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    twin(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())
    assert torch.equal(gonio.doctor(model, batch=x).model(x), expected)


class Block(nn.Module):
    """Attention of two heads behind a norm, and a stream around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (2, 4)).transpose(-3, -2) for layer in (self.q, self.k, self.v))
        return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))


def transformer() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 3))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 2.0)
    return model.double().eval()


@pytest.mark.parametrize("given", [True, False], ids=["example", "made"])
@pytest.mark.parametrize(
    "verb",
    [
        lambda model, **example: gonio.fold_(model, gains=True, **example),
        gonio.rotate_,
        gonio.balance_,
        gonio.surgery.anatomy,
        gonio.surgery.qk_norm,
        lambda model, **_: gonio.param_groups(model, matrices=True),
    ],
)
def test_inference_mode_changes_no_result(verb: Callable[..., object], given: bool) -> None:
    """Gradients tell what reads what; in inference mode there are none."""
    said = []
    for mode in (False, True):
        model = transformer()
        with torch.inference_mode(mode):
            example = {"example": torch.ones(2, 5, 8, dtype=torch.float64)} if given else {}
            try:
                said.append(str(verb(model, **example)))
            except gonio.GonioError as error:
                said.append(str(error))
    assert said[0] == said[1]


def verbs(x: Tensor) -> dict[str, Callable[[nn.Module], object]]:
    return {
        "balance_": partial(gonio.balance_, example=x),
        "rotate_": partial(gonio.rotate_, example=x),
        "fold_": partial(gonio.fold_, example=x, gains=True),
        "init_": lambda model: gonio.init_(model, gonio.init.orthogonal_),
        "even_out_": gonio.even_out_,
        "recycle_": partial(gonio.recycle_, example=x),
        "calibrate_": lambda model: gonio.calibrate_(model, [x]),
        "WeightNorm": lambda model: gonio.parametrize_(model, gonio.parametrizations.WeightNorm()),
        "L2": lambda model: gonio.Penalty(model, [(None, gonio.regularizers.L2(1.0))]),
        "hold_": lambda model: gonio.hold_(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    }


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("verb", verbs(torch.zeros(1)))
@pytest.mark.parametrize("make", ["script", "trace", "export"])
def test_a_model_of_compiled_code_is_measured_and_edited_or_refused(verb: str, make: str) -> None:
    """Scripted modules have no hooks and no dict of parameters; a model of torch.export refuses to change its mode."""
    x = torch.randn(4, 3, 6, 6)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).eval()
    kinds: dict[str, Callable[[], nn.Module]] = {
        "script": lambda: torch.jit.script(plain),
        "trace": lambda: torch.jit.trace(plain, x),
        "export": lambda: torch.export.export(plain, (x,)).module(),
    }
    model = kinds[make]()
    assert gonio.measure(model, batch=x).coverage == gonio.measure(plain).coverage
    assert gonio.equivalent(model, plain, example=x).absolute <= 1e-6
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with suppress(gonio.errors.GonioError):
        verbs(x)[verb](model).undo_()  # type: ignore[attr-defined]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
def test_a_scripted_part_is_left_out_and_the_others_are_edited() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2))
    assert [change.path for change in gonio.init_(model, gonio.init.orthogonal_).changes] == ["2"]
    with pytest.raises(gonio.errors.NoMatchError, match=r"0 \(it is scripted, and runs compiled code"):
        gonio.init_(model, gonio.init.orthogonal_, where="0")


class InPlace(nn.Module):
    """It runs, and cannot be differentiated: it overwrites what the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.norm(x))
        z = y * y
        y[0] = 0
        return x + self.mix(z)


def test_turning_a_model_that_cannot_be_differentiated_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), InPlace(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    with pytest.raises(gonio.errors.NotApplicableError, match=r"the gradients .* cannot be computed \(one of the var"):
        gonio.rotate_(model, example=torch.randn(3, 4).double())


@pytest.mark.parametrize(
    "act",
    [
        lambda model: gonio.measure(model, batch=X),
        lambda model: gonio.lsuv_(model, X),
        lambda model: gonio.calibrate_(model, [X]),
        lambda model: gonio.hold_(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    ],
)
def test_a_model_on_the_meta_device_is_refused_in_words(act: Callable[[nn.Module], object]) -> None:
    with torch.device("meta"):
        model = network()
    with pytest.raises(gonio.errors.GonioError, match="on the meta device"):
        act(model)


def with_a_lazy_norm() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))


@pytest.mark.parametrize(
    "verb",
    [
        lambda model: gonio.lsuv_(model, X),
        lambda model: gonio.measure(model, batch=X),
        lambda model: gonio.doctor(model, batch=X),
        lambda model: gonio.equivalent(model, model, example=X),
    ],
    ids=["lsuv_", "measure", "doctor", "equivalent"],
)
def test_a_model_with_buffers_without_a_shape_is_run_on_copies(verb: Callable[[nn.Module], object]) -> None:
    model = with_a_lazy_norm()
    verb(model)
    assert isinstance(model[1], nn.LazyBatchNorm2d)
    assert isinstance(model[4], nn.LazyLinear)
    buffers = (model[1].running_mean, model[1].running_var)
    assert all(isinstance(buffer, nn.parameter.UninitializedBuffer) for buffer in buffers)


@pytest.mark.parametrize(
    "verb",
    [
        lambda model: gonio.calibrate_(model, [X]),
        lambda model: gonio.match_statistics_(model, [X]),
        lambda model: gonio.lsuv_(model, X),
    ],
    ids=["calibrate_", "match_statistics_", "lsuv_"],
)
@pytest.mark.parametrize("itself", [False, True])
def test_what_a_model_draws_leaves_the_generator_as_it_was(
    verb: Callable[[nn.Module], object], itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    model[3] = Drawing()
    if itself:
        monkeypatch.setattr("gonio.editing.twin.is_sharded", lambda model: True)
    state = torch.random.get_rng_state()
    verb(model)
    assert torch.equal(torch.random.get_rng_state(), state)


class Drawing(nn.Module):
    """Draws in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.3, training=True)
