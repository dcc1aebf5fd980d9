"""A hold watches its promise: other edits, lost handles, methods beside `step`, and state saved by others."""

from __future__ import annotations

import collections
import copy
import gc
import json
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import gonio
from catalog import seeded
from foreign import ONE_PROCESS
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NormNotHeldError, NotApplicableError
from gonio.optim import Muon, release_
from gonio.optim.holding import step_of_hold
from laws.support import reloaded

Optimizer = torch.optim.Optimizer


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 4))
    nn.init.uniform_(model[1].running_var, 4, 9)
    return model


X = seeded(4, 3, 5, 5)


def backward(model: nn.Module, seed: int = 0) -> None:
    model.zero_grad()
    (model(X) * seeded(4, 4, seed=seed)).sum().backward()


def norms(model: nn.Module) -> list[float]:
    return [float(p.detach().norm()) for p in model.parameters() if p.ndim > 1]


# --- edits of held weights --------------------------------------------------------------------------------------------

EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "fold_": gonio.fold_,
    "balance_": lambda m: gonio.balance_(m, level="layer"),
    "init_": lambda m: gonio.init_(m, gonio.init.orthogonal_, gain=3.0),
    "lsuv_": lambda m: gonio.lsuv_(m, X),
    "even_out_": lambda m: gonio.even_out_(_out_of_scale(m)),
    "shrink_change_": lambda m: gonio.shrink_change_(m, {n: 0 * p for n, p in m.state_dict().items()}),
    "shrink_intruders_": lambda m: gonio.shrink_intruders_(m, m, k=99, threshold=2, factor=0),
}


def _out_of_scale(model: nn.Module) -> nn.Module:
    """The model with the weights of a layer times 100."""
    weight = next(p for p in model.parameters() if p.ndim > 1)
    weight.data.mul_(100)
    return model


def edited_network(verb: str) -> nn.Module:
    if verb == "balance_":
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(75, 9), nn.ReLU(), nn.Linear(9, 4)).eval()
    return network().eval()


@pytest.mark.parametrize("verb", EDITS)
@pytest.mark.parametrize("norm", ["matrix", "filters"])
def test_an_edit_of_held_weights_is_not_undone_by_the_next_step(verb: str, norm: str) -> None:
    model = edited_network(verb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12, momentum=0.9)
    held = gonio.hold_(model, optimizer, norm=norm)
    backward(model)
    optimizer.step()  # the radii are in the optimizer's state
    before, radii = [p.detach().clone() for p in model.parameters()], held.state_dict()
    edited = EDITS[verb](model)
    assert any("is held at its new norm from now on" in note for note in edited.notes)
    y = model(X).detach()
    backward(model)
    optimizer.step()
    torch.testing.assert_close(model(X), y, rtol=1e-4, atol=1e-5)
    edited.undo_()
    assert all(torch.equal(radii[name], radius) for name, radius in held.state_dict().items())
    backward(model)
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p, old, rtol=1e-5, atol=1e-6)
    held.undo_()


@pytest.mark.filterwarnings("ignore:hold_ had no effect")  # weights are changed by hand
@pytest.mark.parametrize("verb", EDITS)
def test_an_edit_against_a_radius_that_was_given_is_refused_and_changes_nothing(verb: str) -> None:
    model = edited_network(verb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = gonio.hold_(model, optimizer, radius=2.0)
    if verb == "balance_":  # it would keep equal norms
        with torch.no_grad():
            model[1].weight[0] *= 1.5
            model[1].weight *= 2 / model[1].weight.norm()
        level = {"level": "neuron"}
        act: Callable[[nn.Module], Any] = lambda m: gonio.balance_(m, **level)  # noqa: E731
    else:
        act = EDITS[verb]
    if verb == "even_out_":
        _out_of_scale(model)
        act = gonio.even_out_
    state = copy.deepcopy(model.state_dict())
    modules = list(map(type, model.modules()))
    with pytest.raises(
        NotApplicableError, match=rf"{verb}: cannot change layer '.*weight': hold_ holds its norm at 2, "
    ):
        act(model)
    assert modules == list(map(type, model.modules()))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    held.undo_()
    act(model)


# --- what is not a step -----------------------------------------------------------------------------------------------


class TwoSteps(Optimizer):
    """Descent by methods of its own, as a search along a line has; nothing that torch reports."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def second(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.sub_(p.grad, alpha=group["lr"])

    def step(self, closure: Any = None) -> None: ...


class Frugal(Optimizer):
    """Releases gradients as soon as they are used; `how` is how it changes the weights."""

    def __init__(self, params: Any, how: str, clear: bool = True) -> None:
        super().__init__(params, {"lr": 0.1})
        self.how, self.clear = how, clear

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                new = p - group["lr"] * p.grad
                if self.how == "data":
                    p.data = new
                elif self.how == "copy":
                    p.copy_(new)
                else:
                    p.data.copy_(new)
                p.grad = None if self.clear else p.grad


@pytest.mark.parametrize("how", ["data", "copy", "copy of data"])
@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("step", ["free", "fixed"])
def test_gradients_may_be_released_in_the_step(how: str, clear: bool, step: str) -> None:
    model = network()
    optimizer = Frugal(model.parameters(), how, clear)
    gonio.hold_(model, optimizer, step=step)
    before, weight = norms(model), model[4].weight.detach().clone()
    for seed in range(4):
        backward(model, seed)
        optimizer.step()
    assert norms(model) == pytest.approx(before, rel=1e-6)
    assert not torch.allclose(model[4].weight, weight)


def test_gradients_of_a_closure_may_be_released() -> None:
    model = network()
    optimizer = Frugal(model.parameters(), "copy")
    gonio.hold_(model, optimizer)
    before = norms(model)
    for seed in range(3):
        model.zero_grad()
        optimizer.step(lambda seed=seed: backward(model, seed))
    assert norms(model) == pytest.approx(before, rel=1e-6)


def test_training_that_no_step_shows_is_named_when_it_is_saved() -> None:
    model = network()
    optimizer = TwoSteps(model.parameters())
    gonio.hold_(model, optimizer)
    optimizer.state_dict()
    backward(model)
    optimizer.state_dict()  # gradients alone are no sign
    optimizer.second()
    message = r"hold_: the norm of 0.weight is not held; its norm changed, and no step\(\) of the TwoSteps was observed"
    with pytest.raises(NormNotHeldError, match=message):
        optimizer.state_dict()


@pytest.mark.parametrize("how", ["groups replaced", "another optimizer's parameters"])
def test_a_weight_that_leaves_the_optimizer_is_named_in_the_first_steps(how: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gonio.hold_(model, optimizer)
    if how == "groups replaced":
        master = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        optimizer.param_groups[0]["params"] = master
    backward(model)
    if how == "groups replaced":
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.1)
        with pytest.raises(NormNotHeldError, match="and the parameter groups of the optimizer do not have it"):
            optimizer.step()
    else:
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # nobody observes it
        optimizer.step()  # projects
        assert norms(model) == pytest.approx(norms(network()), rel=1e-6)


def test_copies_that_take_the_place_of_the_weights_are_named() -> None:
    """Gradients go to the copies, which are written to the weights after the step, as DeepSpeed's ZeRO does."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    gonio.hold_(model, optimizer)
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer.param_groups[0]["params"] = copies

    def train() -> None:
        backward(model)
        for master, p in zip(copies, model.parameters(), strict=True):
            master.grad, p.grad = p.grad, None
        optimizer.step()
        for master, p in zip(copies, model.parameters(), strict=True):
            p.data.copy_(master.data)

    train()
    with pytest.raises(NormNotHeldError, match="and the parameter groups of the optimizer do not have it"):
        train()


def test_weights_loaded_before_the_first_step_are_no_fault() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gonio.hold_(model, optimizer)
    before = norms(model)
    model.load_state_dict(network(1).state_dict())
    optimizer.state_dict()
    backward(model)
    optimizer.step()
    assert norms(model) == pytest.approx(before, rel=1e-6)


def test_refusals() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(
        InvalidArgumentError, match=r"hold_\(step='fixed'\) needs a learning rate; found a parameter group"
    ):
        gonio.hold_(model, optimizer, step="fixed")
    gonio.hold_(model, optimizer).undo_()
    for value in (1e20, float("inf"), float("nan")):
        model.weight.data[1, 1] = value
        with pytest.raises(
            NotApplicableError, match=r"the norm of 1 of its vectors is 0 or not finite in torch.float32"
        ):
            gonio.hold_(model, optimizer, norm="filters")


# --- handles that are lost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["nothing", "the handle"])
@pytest.mark.parametrize("collects", [True, False])
def test_a_hold_ends_with_its_optimizer(kept: str, collects: bool) -> None:
    model = network()
    swapped = gonio.swap_(model, gonio.nn.to_group_norm, groups=2)

    def phase() -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        held = gonio.hold_(model, optimizer, step="fixed")
        backward(model)
        optimizer.step()
        return held if kept == "the handle" else None

    held = phase()
    if collects:
        gc.collect()
    assert step_of_hold(model[0].weight) is None or held is not None
    second = torch.optim.Adam(model.parameters(), lr=0.1)
    if held is not None and step_of_hold(model[0].weight) is not None:
        held.undo_()
    again = gonio.hold_(model, second)
    before = norms(model)
    backward(model)
    second.step()
    assert norms(model) == pytest.approx(before, rel=1e-6)
    again.undo_()
    swapped.undo_()


def test_a_hold_whose_handle_is_lost_can_be_ended() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gonio.hold_(model, optimizer)
    with pytest.raises(AlreadyAppliedError, match=r"a hold of 'weight'"):
        gonio.hold_(model, optimizer)
    backward(model)
    optimizer.step()
    before = norms(model)
    part = release_(model[4])
    backward(model)
    optimizer.step()
    after = norms(model)
    assert after[0] == pytest.approx(before[0], rel=1e-6)
    assert after[1] != pytest.approx(before[1], rel=1e-5)
    part.undo_()
    backward(model)
    optimizer.step()
    assert norms(model) == pytest.approx(before, rel=1e-6)
    assert str(release_(model)) == "release_: 2 modules\n  0  weight: not held any more\n  4  weight: not held any more"
    assert all("gonio_radius" not in state for state in optimizer.state.values())
    with pytest.raises(gonio.errors.NoMatchError, match=r"release_"):
        release_(model)
    gonio.hold_(model, optimizer, norm="filters")


# --- state where others save it ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(q * k + v)


def transformer(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Attention(), nn.Linear(8, 4))


def made(kind: str, seed: int) -> tuple[nn.Module, Optimizer]:
    model = transformer(seed)
    if kind == "Muon":
        return model, Muon(gonio.param_groups(model, 0.1, matrices=True), lr=0.1)
    rules = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
    optimizer: Optimizer = rules[kind](model.parameters(), lr=0.05)
    gonio.hold_(model, optimizer, norm="filters")
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    model.zero_grad()
    model(seeded(5, 8, seed=seed)).square().sum().backward()
    optimizer.step()


def through_torch(source: Any, target: Any) -> None:
    for mine, other in zip(reloaded([part.state_dict() for part in source]), target, strict=True):
        other.load_state_dict(mine)


def through_dcp(source: Any, target: Any, **options: Any) -> None:
    option = StateDictOptions(**options)
    state = dict(zip(("model", "optimizer"), get_state_dict(*source, options=option), strict=True))
    empty = dict(zip(("model", "optimizer"), get_state_dict(*target, options=option), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state, checkpoint_id=folder, **ONE_PROCESS)
        dcp.load(empty, checkpoint_id=folder, **ONE_PROCESS)
    loaded = {"model_state_dict": empty["model"], "optim_state_dict": empty["optimizer"]}
    set_state_dict(*target, **loaded, options=option)


def through_json_and_tensors(source: Any, target: Any) -> None:
    """Options as JSON, tensors by name, as a writer of its own might do."""
    target[0].load_state_dict(source[0].state_dict())
    state = source[1].state_dict()
    groups = json.loads(json.dumps(state["param_groups"]))
    flat = {f"{i}.{k}": v for i, each in state["state"].items() for k, v in each.items() if isinstance(v, Tensor)}
    back: dict[int, dict[str, Any]] = collections.defaultdict(dict)
    for key, value in flat.items():
        index, _, name = key.partition(".")
        back[int(index)][name] = value.clone()
    target[1].load_state_dict({"state": dict(back), "param_groups": groups})


WAYS: dict[str, Callable[[Any, Any], None]] = {
    "torch": through_torch,
    "DCP": through_dcp,
    "DCP, flattened": lambda s, t: through_dcp(s, t, flatten_optimizer_state_dict=True),
    "JSON": through_json_and_tensors,
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of a save by one process
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["Muon", "SGD", "AdamW"])
def test_a_training_resumes_to_the_last_bit(kind: str, way: str) -> None:
    source, target = made(kind, 0), made(kind, 1)
    for seed in range(2):
        train(*source, seed)
    WAYS[way](source, target)
    for seed in range(2, 4):
        train(*source, seed)
        train(*target, seed)
    for name, value in source[0].state_dict().items():
        assert torch.equal(target[0].state_dict()[name], value), name


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of a save by one process
def test_a_parameter_that_never_runs_hinders_no_resume() -> None:
    """SGD without momentum stores nothing, and resumes; with radii torch asks for state of every parameter."""
    pairs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"used": nn.Linear(4, 3, bias=False), "idle": nn.Linear(4, 3)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gonio.hold_(model, optimizer, where="used")
        pairs.append((model, optimizer))
    (model, optimizer), (other, twin) = pairs
    model["used"](torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    through_dcp((model, optimizer), (other, twin))
    radius = twin.state[other["used"].weight]["gonio_radius"]
    assert torch.equal(radius, optimizer.state[model["used"].weight]["gonio_radius"])


@pytest.mark.parametrize("kind", ["Muon", "SGD", "AdamW"])
@pytest.mark.parametrize("how", ["defaultdict", "clear", "deepcopy"])
def test_a_reset_of_the_state_forgets_momenta_alone(kind: str, how: str) -> None:
    model, optimizer = made(kind, 0)
    other, twin = made(kind, 0)
    if how == "deepcopy":
        if kind != "Muon":
            return  # a copy of an optimizer has no hooks
        both = copy.deepcopy((other, twin))
        other, twin = both
    elif how == "clear":
        twin.state.clear()
    else:
        twin.state = collections.defaultdict(dict)
    train(model, optimizer, 0)
    train(other, twin, 0)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", ["halved", "averaged"])
def test_radii_survive_casts_and_averages(dtype: torch.dtype, change: str) -> None:
    model, optimizer = made("AdamW", 0)
    train(model, optimizer, 0)
    radii = {p: state["gonio_radius"].clone() for p, state in optimizer.state.items() if "gonio_radius" in state}
    state = optimizer.state_dict()
    for each in state["state"].values():
        for key, value in each.items():
            if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                each[key] = value.to(dtype) if change == "halved" else (value + value) / 2
    optimizer.load_state_dict(state)
    for p, radius in radii.items():
        found = optimizer.state[p]["gonio_radius"]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, radius, rtol=0 if change == "averaged" else torch.finfo(dtype).eps, atol=0)


def test_radii_of_half_precision_weights_are_not_cast() -> None:
    model = nn.Linear(8, 4, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    held = gonio.hold_(model, optimizer)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    radius = held.state_dict()["weight"].clone()
    optimizer.load_state_dict(reloaded(optimizer.state_dict()))
    assert torch.equal(held.state_dict()["weight"], radius)
    assert optimizer.state[model.weight]["gonio_radius"].dtype == torch.float32


def test_optimizer_state_of_0_1_is_still_read() -> None:
    """Radii under a key of their own, and Muon's blocks in the state of each parameter."""
    model, optimizer = made("AdamW", 0)
    train(model, optimizer, 0)
    old = optimizer.state_dict()
    radii = {f"{path}.weight": 2 * optimizer.state[m.weight]["gonio_radius"] for path, m in model.named_modules()
             if isinstance(m, nn.Linear)}  # fmt: skip
    old["state"] = {i: {k: v for k, v in s.items() if k != "gonio_radius"} for i, s in old["state"].items()}
    optimizer.load_state_dict({**old, "gonio_hold": radii})
    train(model, optimizer, 1)
    torch.testing.assert_close(model[1].weight.norm(dim=1), radii["1.weight"].flatten())
    with pytest.raises(InvalidArgumentError, match=r"has a radius of shape \(1, 4, 1\) for 1.weight; found none"):
        optimizer.load_state_dict({**old, "gonio_hold": {k: v for k, v in radii.items() if k != "1.weight"}})

    model, muon = made("Muon", 0)
    expected = [copy.deepcopy(group["blocks"]) for group in muon.param_groups]
    train(model, muon, 0)
    saved = muon.state_dict()
    for group in saved["param_groups"]:
        for index, code in zip(group["params"], group.pop("blocks"), strict=True):
            saved["state"].setdefault(index, {}).update({} if code is None else {"blocks": tuple(code)})
        del group["others_lr"]
    other = Muon([{**g, "blocks": None} for g in gonio.param_groups(transformer(0), 0.1, matrices=True)], lr=0.1)
    other.load_state_dict(reloaded(saved))
    assert [group["blocks"] for group in other.param_groups] == expected
    assert all("blocks" not in state for state in other.state.values())
    fresh = made("Muon", 1)[1]
    for state in saved["state"].values():  # as torch.optim.Muon saves: no blocks at all
        state.pop("blocks", None)
    fresh.load_state_dict(saved)
    assert [group["blocks"] for group in fresh.param_groups] == expected


def test_a_copy_of_muon_takes_groups() -> None:
    model = transformer(0)
    optimizer = copy.deepcopy(Muon(gonio.param_groups(model, matrices=True), lr=0.1, others_lr=0.01))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "matrices": False})
    assert optimizer.param_groups[-1]["lr"] == 0.01
    with pytest.raises(
        InvalidArgumentError, match=r"one entry of `blocks` for each parameter; found 2 for 1 parameters"
    ):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 3))], "blocks": [(1, 0, 0), (1, 0, 0)]})
    with pytest.raises(InvalidArgumentError, match=r"Muon takes real parameters; found one of torch.complex64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 3


def test_blocks_follow_their_parameters_into_other_groups() -> None:
    """hold_ takes held weights out of a group that decays; the undo brings them back."""
    model, optimizer = made("Muon", 0)

    def pairs() -> list[list[tuple[int, Any]]]:
        return [list(zip(map(id, g["params"]), g["blocks"], strict=True)) for g in optimizer.param_groups]

    before = pairs()
    codes = dict(pair for group in before for pair in group)
    held = gonio.hold_(model, optimizer, where="0.qkv", norm="filters", magnitude="learned")
    after = pairs()
    assert len(after) > len(before)
    assert all(codes.get(key) == code for group in after for key, code in group)
    train(model, optimizer, 0)
    held.undo_()
    assert pairs() == before
