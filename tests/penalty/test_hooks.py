"""Hooks: what they count, what they refuse, and that nothing of them is left."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from catalog import seeded
from gonio import Penalty
from gonio import regularizers as R
from gonio.errors import InvalidArgumentError, NoActivationError
from gonio.penalty import hooks as hooks_module
from laws.support import reloaded
from tolerances import close

SOM = R.SelfOrthogonality(1.0)


class Network(nn.Module):
    """Two layers; `how` says how the first one runs."""

    def __init__(self, how: str = "plain", *, inplace: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.first, self.act, self.last = nn.Linear(6, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 4)

    def block(self, x: Tensor) -> Tensor:
        return self.act(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.last(self.block(x))
        return self.last(checkpoint(self.block, x, use_reentrant=self.how == "reentrant"))


def batch(seed: int = 0) -> Tensor:
    return seeded(32, 6, seed=seed)


def penalised(how: str = "plain", *, inplace: bool = False, by: R.SelfOrthogonality = SOM) -> tuple[Network, Penalty]:
    """A network and a penalty of the outputs of its first layer."""
    model = Network(how, inplace=inplace)
    return model, Penalty(model, [("first", by)])


def step(model: nn.Module, penalty: Penalty, x: Tensor) -> None:
    model.zero_grad()
    (model(x).square().mean() + penalty()).backward()


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# --- what counts ----------------------------------------------------------------------------------


def test_checkpointing_changes_no_bit_and_counts_once() -> None:
    """F2: the recomputation in the backward fires the hook again."""
    found = []
    for how in ("plain", "non-reentrant"):
        model = Network(how)
        penalty = Penalty(model, [("first", SOM), ("last", SOM)])
        for seed in range(3):
            step(model, penalty, batch(seed))
            found.append(torch.tensor(list(penalty.values().values())))
            assert penalty._terms[0]._hook._kept == []  # type: ignore[attr-defined]
        found += grads(model)
    half = len(found) // 2
    assert all(torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True))


def test_reentrant_checkpointing_is_refused() -> None:
    model, penalty = penalised("reentrant")
    model(batch().requires_grad_())
    with pytest.raises(NoActivationError, match="cannot read the outputs of first; it ran only without gradients"):
        penalty()
    model(batch().requires_grad_()).sum().backward()
    with pytest.raises(NoActivationError, match=r"as under reentrant checkpointing. Use checkpoint\(…, use_reentrant="):
        penalty()


def test_evaluation_is_not_counted() -> None:
    model, penalty = penalised()
    x = batch()
    model.eval()
    model(batch(1))
    model.train()
    with torch.no_grad():
        model(batch(2))
    expected = SOM.value(model.first(x))
    penalty._terms[0]._hook.forget()  # type: ignore[attr-defined]
    model(x)
    torch.testing.assert_close(penalty(), expected, **close(torch.float32))


@pytest.mark.parametrize(
    ("prepare", "match"),
    [
        (lambda model, penalty: None, "it did not run since the last call, or was compiled before the penalty was"),
        (lambda model, penalty: step(model, penalty, batch()), "it did not run since the last call"),
        (lambda model, penalty: model.eval()(batch()), "it ran only in evaluation mode. Call penalty"),
        (lambda model, penalty: torch.no_grad()(model)(batch()), "it ran only without gradients. Call penalty"),
        (lambda model, penalty: torch.inference_mode()(model)(batch()), "it ran only without gradients. Call penalty"),
        (lambda model, penalty: penalty.undo_(), "this penalty was removed, or is a copy. Build a new one."),
    ],
    ids=["nothing", "last step", "eval", "no_grad", "inference", "removed"],
)
def test_nothing_seen_is_an_error(prepare: Callable[[nn.Module, Penalty], object], match: str) -> None:
    model, penalty = penalised()
    prepare(model, penalty)
    with pytest.raises(NoActivationError, match=match):
        penalty()


def test_a_layer_whose_weight_is_used_without_calling_it_is_said() -> None:
    model = nn.ModuleDict({"dt_proj": nn.Linear(8, 8)})  # as in Mamba
    penalty = Penalty(model, [("dt_proj", SOM)])
    nn.functional.linear(seeded(2, 8), model["dt_proj"].weight)
    with pytest.raises(NoActivationError, match=r"dt_proj.* without calling it .* exclude in `where` layers"):
        penalty()


def test_outputs_on_a_mesh_of_several_dimensions_need_a_process_group() -> None:
    """Hybrid sharding: which processes share a batch cannot be known, and the local batch would be silently wrong."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        layer = fully_shard(nn.Linear(4, 4), mesh=mesh)
        with pytest.raises(InvalidArgumentError, match=r"process_group=…\) is needed .* a mesh of shape \(2, 2\)"):
            Penalty(layer, [(None, SOM)])
        Penalty(layer, [(None, SOM)], process_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_a_layer_that_runs_several_times_contributes_the_mean() -> None:
    model, penalty = penalised()
    expected = torch.stack([SOM.value(model.first(batch(s))) for s in (1, 2)]).mean()
    penalty._terms[0]._hook.forget()  # type: ignore[attr-defined]
    model(batch(1)), model(batch(2))
    total = penalty()
    torch.testing.assert_close(total, expected, **close(torch.float32))
    assert sum(penalty.values().values()) == pytest.approx(float(total.detach()), rel=1e-5)


# --- in-place operations ----------------------------------------------------------------------------


@pytest.mark.parametrize("regularizer", [SOM, R.SelfOrthogonality.paper(1e-3)], ids=["centred", "less the bias"])
@pytest.mark.parametrize("inplace", [False, True])
def test_outputs_are_read_as_the_layer_put_them_out(inplace: bool, regularizer: R.SelfOrthogonality) -> None:
    """F5: the activation may overwrite what the hook kept."""
    (model, penalty), (reference, plain) = penalised(inplace=inplace, by=regularizer), penalised(by=regularizer)
    for seed in range(3):
        step(model, penalty, batch(seed)), step(reference, plain, batch(seed))
        for a, b in zip(grads(model), grads(reference), strict=True):
            torch.testing.assert_close(a, b, **close(torch.float32))
    assert penalty._terms[0]._hook._copies is inplace  # type: ignore[attr-defined]


def test_outputs_overwritten_later_are_an_error_once() -> None:
    model, penalty = penalised()
    for _ in range(2):
        step(model, penalty, batch())
    model.act.inplace = True
    model(batch())
    with pytest.raises(NoActivationError, match="overwritten in place, which it was not in earlier steps"):
        penalty()
    model(batch())
    assert penalty().isfinite()


# --- compilers ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_after_the_penalty_was_built(inplace: bool) -> None:
    eager, model = Network(), Network(inplace=inplace)
    plain, penalty = (Penalty(m, [("first", SOM), (None, R.Orthogonality(0.1))]) for m in (eager, model))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        step(eager, plain, batch(seed)), step(compiled, penalty, batch(seed))
        assert penalty.values() == pytest.approx(plain.values(), rel=1e-4)
        for a, b in zip(grads(model), grads(eager), strict=True):
            torch.testing.assert_close(a, b, **close(torch.float32))


def test_compiled_before_the_penalty_was_built_is_an_error() -> None:
    """F1: a hook registered after the first compiled call never fires, silently."""
    model = Network()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(batch())
    penalty = Penalty(model, [("first", SOM)])
    compiled(batch())
    with pytest.raises(NoActivationError, match="compiled before the penalty was built"):
        penalty()


def test_a_second_compiled_model_of_the_same_class_is_read_or_refused() -> None:
    """The code compiled for the first model may be reused without the second one's hook; never silently."""
    first, second = Network(), Network()
    torch.compile(first, backend="aot_eager")(batch())
    penalty = Penalty(second, [("first", SOM)])
    torch.compile(second, backend="aot_eager")(batch())
    try:
        found = penalty()
    except NoActivationError:
        return
    torch.testing.assert_close(found, SOM.value(second.first(batch())), **close(torch.float32))


# --- leaving --------------------------------------------------------------------------------------


def test_no_hook_is_left() -> None:
    model = Network()
    with Penalty(model, [(None, SOM), (None, R.L2(1.0))]):
        assert hooks(model) == 2
    assert hooks(model) == 0
    weights = Penalty(model, [(None, R.L2(1.0))])
    weights.undo_()
    assert weights() > 0, "a term on weights can be computed afterwards"
    with pytest.raises(ZeroDivisionError, match="division"), Penalty(model, [(None, SOM)]):
        raise ZeroDivisionError("division")
    assert hooks(model) == 0


def test_activations_are_let_go() -> None:
    """F3: after a step, nothing holds the outputs but the graph."""
    model, penalty = penalised()
    held: list[weakref.ref[Tensor]] = []
    model.first.register_forward_hook(lambda module, args, output: held.append(weakref.ref(output)))
    for seed in range(3):
        step(model, penalty, batch(seed))
    gc.collect()
    assert [ref() for ref in held] == [None, None, None]


def live_bytes() -> int:
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    return sum(x.untyped_storage().nbytes() for x in tensors if x.layout == torch.strided)


def test_many_steps_keep_nothing() -> None:
    """F3: neither outputs nor graphs nor what is kept for logging add up."""
    model = Network()
    penalty = Penalty(model, [("first", SOM), (None, R.SRIP(1.0)), (None, R.ScaleShift(1e-3))])
    for seed in range(3):
        step(model, penalty, batch(seed))
    before = live_bytes()
    for seed in range(100):
        step(model, penalty, batch(seed % 7))
        penalty.values()
    assert live_bytes() == before


def test_forgetting_to_call_is_an_error_not_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks_module, "MOST_KEPT", 5)
    model, penalty = penalised()
    for _ in range(5):
        model(batch())
    with pytest.raises(NoActivationError, match="it ran 5 times since penalty\\(\\) was last called"):
        model(batch())
    assert penalty().isfinite()


def test_copies_and_pickles_of_the_model_hold_no_activation() -> None:
    model, penalty = penalised()
    model(batch())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), reloaded(model, weights_only=False)):
        twin(batch())
        (hook,) = twin.first._forward_hooks.values()
        assert not hasattr(hook.__self__, "_kept")
    assert penalty().isfinite()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_the_penalty_reads_no_outputs(copied: Callable[[object], tuple[Network, Penalty]]) -> None:
    """As where a module has its penalty as an attribute, and a callback or a process gets a copy of the module."""
    pair = penalised()
    model, penalty = copied(pair)
    model(batch())
    with pytest.raises(NoActivationError, match=r"this penalty was removed, or is a copy\. Build a new one"):
        penalty()
    penalty.undo_()
    pair[0](batch())
    assert pair[1]().isfinite()
