"""The state of optimizers in checkpoints: whose it is, its figures beside torch's own steps, the rules on it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import gonio
from foreign import ONE_PROCESS
from gonio.editing.optimizer_states import state_powers
from gonio.errors import InvalidArgumentError
from gonio.measuring.figures.moments import Moments, StateSums, state_sums
from gonio.measuring.findings.rules import RULES
from gonio.measuring.reading.source import optimizer_of

Content = dict[str, Any]
RATE = 0.01
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=0.0),
    "Adam 0.95": lambda p: torch.optim.Adam(p, lr=RATE, betas=(0.8, 0.95)),
    "AMSGrad": lambda p: torch.optim.Adam(p, lr=RATE, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9),
}


def network(width: int = 16, depth: int = 5) -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())]
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), *layers, nn.Linear(width, 3))


def trained(make: Any = OPTIMIZERS["AdamW"], steps: int = 20, model: nn.Module | None = None) -> tuple[Any, Any, Any]:
    """The model, its optimizer, and the weights before the last step."""
    model = model or network()
    optimizer = make(model.parameters())
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(32, 6, generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
    return model, optimizer, before


@pytest.fixture(scope="module")
def content() -> Content:
    model, optimizer, _ = trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 20}


def by_path(source: Any) -> dict[str, Any]:
    return {row.path: row for row in gonio.measure(source).optimizer}


def codes(source: Any) -> set[tuple[str, str]]:
    found, checked = gonio.measure(source).findings, gonio.check(source).findings
    ours = {(f.code, f.path) for f in found if f.code.startswith("G8")}
    assert ours == {(f.code, f.path) for f in checked if f.code.startswith("G8")}
    return ours


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_the_one_that_torch_made(name: str) -> None:
    model, optimizer, before = trained(OPTIMIZERS[name])
    rows = by_path({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    weights = {path: p for path, p in model.named_parameters() if p.ndim > 1}
    assert len(weights) == 7
    for path, weight in weights.items():
        row = rows[path.removesuffix(".weight")]
        change = (weight.detach() - before[path]).double().norm()
        assert row.relative_update == pytest.approx(float(change / weight.detach().double().norm()), rel=1e-4)
        assert row.effective_rate == pytest.approx(RATE / float(weight.detach().double().square().sum()))
        assert (row.learning_rate, row.reason) == (RATE, "")
        if name != "SGD":
            assert row.step == 20


def test_the_size_of_gradients_is_that_of_the_second_moment() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad, model.bias.grad = torch.full((3, 4), 0.25), torch.zeros(3)
    optimizer.step()
    rows = by_path({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert rows["weight"].gradient_rms == pytest.approx(0.25)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.5, 0.99), (0.0, 0.9)])
def test_no_gradients_leave_moments_beyond_the_bound_and_some_reach_it(betas: tuple[float, float]) -> None:
    """The worst gradients grow by β₁/β₂ from step to step; random ones with tails stay far below."""
    moments, steps = Moments("exp_avg", "exp_avg_sq", "exp_avg_sq", betas), 60
    bound = moments.bound(steps)
    assert bound is not None
    draw = torch.Generator().manual_seed(0)
    worst = (betas[0] / betas[1]) ** torch.arange(steps - 1, -1, -1.0)
    tails = torch.randn(steps, 500, generator=draw) / torch.randn(steps, 500, generator=draw).abs().clamp(min=1e-3)
    gradients = torch.cat([worst[:, None], tails], dim=1)
    m, v = torch.zeros(501), torch.zeros(501)
    for g in gradients:
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    assert float(m[0].square() / v[0]) == pytest.approx(bound, rel=1e-3)
    assert bool((m.square() <= bound * v * 1.001).all())
    found = StateSums(*state_sums(moments, {"exp_avg": m, "exp_avg_sq": v}, steps).tolist())
    assert found.beyond == 0
    doubled = StateSums(*state_sums(moments, {"exp_avg": 2.1 * m, "exp_avg_sq": v}, steps).tolist())
    assert doubled.beyond >= 1


def test_types_are_told_by_what_they_keep() -> None:
    assert state_powers(["momentum_buffer"]) == {"momentum_buffer": 1}
    assert state_powers(["square_avg", "momentum_buffer"]) == {"square_avg": 2, "momentum_buffer": 0}
    assert state_powers(["exp_avg", "exp_avg_sq", "fp32_param"]) == {"exp_avg": 1, "exp_avg_sq": 2}
    assert state_powers(["state1", "qmap1"]) == {}


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.NAdam(p), lambda p: torch.optim.RAdam(p), lambda p: torch.optim.RMSprop(p),
    lambda p: torch.optim.Adagrad(p), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
])  # fmt: skip
def test_of_other_optimizers_the_update_is_not_guessed(make: Any) -> None:
    model, optimizer, _ = trained(make)
    found = gonio.measure({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert found.optimizer
    assert all(row.update_rms is None and row.reason for row in found.optimizer)
    assert not [f for f in found.findings if f.code.startswith("G8")]


# --- which weight a state belongs to --------------------------------------------------------------------------------


def test_numbers_follow_the_order_of_shapes_where_it_is_the_only_one(content: Content) -> None:
    """Means and variances of batch norms have the shapes of its gains, so that vectors are not told."""
    rows = gonio.measure(content).optimizer
    assert {row.name for row in rows if len(row.shape) == 2} == {n for n, v in content["model"].items() if v.ndim == 2}
    assert "several assignments" in next(row.reason for row in rows if not row.name)
    assert codes(content) == set()


def test_with_decay_for_matrices_alone_each_group_is_in_order(content: Content) -> None:
    model = network()
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is which] for which in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    model, optimizer, _ = trained(lambda _: torch.optim.AdamW(groups, lr=RATE), model=model)
    rows = by_path({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]})  # Lightning's
    assert {"0", "2", "5", "17"} <= rows.keys()


def test_names_in_the_groups_are_taken(content: Content) -> None:
    model, optimizer, _ = trained(
        lambda _: torch.optim.AdamW(model_.named_parameters(), lr=RATE), model=(model_ := network())
    )
    found = gonio.measure({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert [row.name for row in found.optimizer] == [name for name, _ in model.named_parameters()]
    assert all(row.relative_update for row in found.optimizer if len(row.shape) > 1)


def test_one_state_for_all_parameters_belongs_to_none_of_them(tmp_path: Path) -> None:
    """LBFGS keeps it in the first one; a second optimizer beside it is judged as ever."""
    model, data = network(), torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    joint = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        joint.zero_grad()
        loss: Tensor = model(data).square().mean()
        loss.backward()
        return loss

    joint.step(closure)
    torch.save({"model": model.state_dict(), "optimizer": joint.state_dict()}, tmp_path / "m.pt")
    assert {f.code for f in gonio.check(tmp_path / "m.pt").findings if f.code.startswith("G8")} == set()
    (row,) = gonio.measure(tmp_path / "m.pt").optimizer
    assert row.path == "optimizer.state.0"
    assert "1 of them: one state for all parameters of its optimizer" in gonio.check(tmp_path / "m.pt").notes


def saved(folder: Path, content: Content, *, name: str = "optimizer.pt", state: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(content["model"], folder / "model.safetensors")
    torch.save(content["optimizer"] if state is None else state, folder / name)
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    return folder


@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.bin"])
def test_a_file_beside_the_model_is_read(tmp_path: Path, content: Content, name: str) -> None:
    """Safetensors sorts by names: only weights whose shape is the only one of its kind are told."""
    source = saved(tmp_path, content, name=name)
    rows = gonio.measure(source).optimizer
    assert {row.name for row in rows if row.name} == {"0.weight", "17.weight", "17.bias"}
    assert rows[0].place == f"{name}: state.0"
    assert codes(source) == set()
    checked = gonio.check(source)
    assert checked.intact
    assert "the optimizer's state: of 24 parameters" in checked.notes
    assert any("sorts weights by name" in note for note in checked.notes)


def test_a_file_beside_the_model_that_is_cut_off_is_found(tmp_path: Path, content: Content) -> None:
    source = saved(tmp_path, content)
    raw = (source / "optimizer.pt").read_bytes()
    (source / "optimizer.pt").write_bytes(raw[: len(raw) // 2])
    for found in (gonio.check(source), gonio.measure(source)):
        assert [(f.code, f.path) for f in found.findings if f.level == "error"] == [("G701", "optimizer.pt")]


def test_folders_of_torch_name_their_states(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    whole = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        dcp.save(whole, checkpoint_id=tmp_path / "dcp", **ONE_PROCESS)
    rows = gonio.measure(tmp_path / "dcp").optimizer
    plain = by_path({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert {row.name for row in rows} == {name for name, _ in model.named_parameters()}
    assert {row.learning_rate for row in rows} == {RATE}
    assert not any(row.reason for row in rows)
    for row in rows:
        if row.path in plain:
            assert row.relative_update == plain[row.path].relative_update
    assert codes(tmp_path / "dcp") == set()


def test_a_torch_file_is_read_again_from_its_place(
    tmp_path: Path, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gonio.measuring.reading.torch_files.REMAP", 100)
    torch.save(content, tmp_path / "last.ckpt")
    assert by_path(tmp_path / "last.ckpt") == by_path(content)


# --- rules ----------------------------------------------------------------------------------------------------------


def changed(content: Content, change: Callable[[dict[int, Any]], object]) -> Content:
    made = copy.deepcopy(content)
    change(made["optimizer"]["state"])
    return made


def moment(name: str, act: Callable[[Tensor], object]) -> Callable[[dict[int, Any]], object]:
    return lambda states: act(states[6][name])


PLANTED = {
    "a state in no group": (lambda s: s.update({99: s[0]}), {("G801", "optimizer.state.99")}),
    "a state of another shape": (
        lambda s: s[6].update({n: torch.ones(5, 7) for n in ("exp_avg", "exp_avg_sq")}),
        {("G801", "optimizer.state.6")},
    ),
    "no state": (lambda s: s.pop(6), {("G802", "")}),
    "second moments of 0": (
        lambda s: [s[6][n].zero_() for n in ("exp_avg", "exp_avg_sq")], {("G803", "5")}
    ),
    "a negative second moment": (moment("exp_avg_sq", lambda v: v.view(-1)[3].sub_(1)), {("G804", "5")}),
    "first moments too large": (moment("exp_avg", lambda m: m.mul_(1e4)), {("G804", "5"), ("G805", "5")}),
    "one second moment too large": (moment("exp_avg_sq", lambda v: v.view(-1)[3].add_(1e9)), {("G806", "5")}),
    "second moments of one layer too large": (moment("exp_avg_sq", lambda v: v.mul_(1e6)), {("G806", "5")}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_each_rule_finds_its_case(content: Content, name: str) -> None:
    change, expected = PLANTED[name]
    made = changed(content, change)
    found = codes(made)
    assert expected <= found, found
    assert {code for code, _ in found} <= {code for code, _ in expected} | {"G801", "G805"}


@pytest.mark.parametrize("form", ["memory", "optimizer.pt", "a folder with it", "DCP"])
def test_a_state_without_its_weights_is_judged(form: str, content: Content, tmp_path: Path) -> None:
    """Trainers that shard put the optimizer into a file or a folder of its own."""

    def damage(state: dict[int, Any]) -> None:
        state[0]["exp_avg_sq"][2, 3] = -1.0
        state[6]["exp_avg_sq"].zero_()

    state = changed(content, damage)["optimizer"]
    source: Any = state
    if form == "DCP":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
        source = tmp_path / "optimizer_0"
    elif form != "memory":
        torch.save(state, tmp_path / "optimizer.pt")
        source = tmp_path / ("optimizer.pt" if form == "optimizer.pt" else "")
    checked = gonio.check(source)
    found = {(f.code, f.path.partition("state.")[2]) for f in checked.findings}
    assert {("G804", "0"), ("G803", "6")} <= found <= {("G804", "0"), ("G803", "6"), ("G804", "6")}
    assert len(checked.optimizer) == len(content["optimizer"]["state"])
    assert any("no weights are beside it" in note for note in checked.notes)
    with pytest.raises(InvalidArgumentError, match="looks for named tensors"):
        gonio.measure(source)


def test_a_large_rate_is_found(content: Content) -> None:
    made = copy.deepcopy(content)
    made["optimizer"]["param_groups"][0]["lr"] = 30.0
    assert {code for code, _ in codes(made)} == {"G805"}


def test_values_that_are_not_finite_are_found_wherever_they_are(content: Content) -> None:
    made = changed(content, moment("exp_avg", lambda m: m.view(-1)[2].fill_(torch.nan)))
    assert ("G001", "5") in {(f.code, f.path) for f in gonio.measure(made).findings}
    assert ("G001", "optimizer.state.6.exp_avg") in {(f.code, f.path) for f in gonio.check(made).findings}
    other = changed(content, lambda states: states[6].update(acc=torch.full((16, 16), torch.inf)))
    found = gonio.measure(other)
    assert ("G001", "5") in {(f.code, f.path) for f in found.findings}
    assert any("not known as moments of gradients: 1 tensor (acc)" in note for note in found.notes)


def test_moments_in_16_bits_are_not_held_against_the_bound(content: Content) -> None:
    """They are rounded at every step, so that a small second moment stops to shrink."""

    def narrow(states: dict[int, Any]) -> None:
        for one in states.values():
            one.update({n: one[n].bfloat16() for n in ("exp_avg", "exp_avg_sq")})
        states[6]["exp_avg"].mul_(1e4)

    assert {code for code, _ in codes(changed(content, narrow))} == {"G805"}


def test_the_first_factor_of_an_adapter_has_no_gradient_at_first() -> None:
    model = nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False))
    nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for steps in (1, 5):
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.randn(4, 8)) - 1).square().mean().backward()
            optimizer.step()
        assert codes({"model": model.state_dict(), "optimizer": optimizer.state_dict()}) == set()


def test_rows_of_tokens_that_never_occurred_are_no_dead_filters(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(20)).square().sum().backward()
        optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "last.pt")
    for source in (tmp_path / "last.pt", saved(tmp_path / "folder", content)):
        found = gonio.check(source)
        assert found.intact, found
        assert sum(t.state for t in found.tensors) == 4 + 2  # with the steps
        assert max(row.dead_rows for row in found.optimizer) == 30
        assert {row.relative_update is not None for row in found.optimizer} == {True}


def test_every_code_has_a_text() -> None:
    assert {f"G80{n}" for n in range(1, 7)} <= RULES.keys()


# --- hostile contents -----------------------------------------------------------------------------------------------


def test_odd_contents_are_no_states(content: Content) -> None:
    loop: list[Any] = []
    loop += [loop] * 50
    odd: list[Any] = [
        {"state": {}, "param_groups": []},
        {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": "x"},
        {"state": {(1, 2): {"exp_avg": torch.ones(3), "step": "many"}}, "param_groups": [{"params": [{}]}]},
        {"state": {0: {"step": torch.tensor(-3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}},
         "param_groups": [{"params": [0], "lr": "high", "betas": (2.0, -1), "eps": torch.ones(3)}]},
        {"state": {0: {"step": float("inf"), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2, dtype=torch.int8)}},
         "param_groups": [{"params": [0], "lr": float("nan"), "betas": (0.9, 0.0), "amsgrad": False, "eps": 0.0}]},
        {"state": {0: {"exp_avg": torch.eye(3).to_sparse(), "exp_avg_sq": torch.eye(3).to_sparse()}},
         "param_groups": [{"params": [0], "betas": (0.9, 0.99)}]},
        {"state": {0: {"exp_avg": torch.ones(2), "step": torch.ones(1).to_sparse()}}, "param_groups": [{"params": {}}]},
        {"state": {0: {"exp_avg": torch.ones(0)}}, "param_groups": {"a": {"params": [0]}}},
        loop,
    ]  # fmt: skip
    for one in odd:
        source = {"model": content["model"], "optimizer": one}
        assert optimizer_of(source) is not None
        assert len(gonio.measure(source)) == len(content["model"])
        gonio.check({k: v for k, v in source.items() if one is not loop})
