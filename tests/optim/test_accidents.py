"""Accidents of training under a penalty, a hold and a tracker: NaN, overflow, and a rank of a group that dies."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import get_context
from torch.nn.parallel import DistributedDataParallel

import gonio
from catalog import seeded

RADIUS = 1.0
Watched = tuple[gonio.Penalty, gonio.Edited, gonio.Tracker]


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    gonio.init_(model, gonio.init.he_, seed=0, gain=1.0)
    return model


def watched(model: nn.Module, optimizer: torch.optim.Optimizer) -> Watched:
    """A penalty on all layers, the first one's filters held on the sphere, and both watched."""
    return (
        gonio.Penalty(model, [(nn.Linear, gonio.regularizers.Orthogonality(1e-2))]),
        gonio.hold_(model, optimizer, where="0", norm="filters", radius=RADIUS),
        gonio.Tracker(model, optimizer=optimizer, every=1),
    )


def trained(
    losses: Callable[[Tensor, int], Tensor], steps: int, **options: Any
) -> tuple[nn.Module, gonio.Tracker, gonio.Edited]:
    """Steps under a scaler of gradients, of which those that overflow are skipped."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    penalty, held, tracker = watched(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000, **options)
    for number in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = losses(model(seeded(16, 6, seed=number)).float(), number)
        scaler.scale(loss + penalty()).backward()
        scaler.step(optimizer)
        scaler.update()
    return model, tracker, held


def usual(output: Tensor, number: int) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e38])
def test_skipped_steps_are_as_if_they_had_not_been(bad: float) -> None:
    """A step whose gradients are not finite changes neither weights nor the norm that is held, and has no row."""

    def accident(output: Tensor, number: int) -> Tensor:
        return usual(output, number) * (bad if number == 4 else 1.0)

    model, tracker, held = trained(accident, 5)
    before, expected, _ = trained(usual, 4)
    assert all(map(torch.equal, model.state_dict().values(), before.state_dict().values()))
    assert tracker.rows == expected.rows
    norms = model.get_submodule("0").weight.norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, RADIUS))
    held.undo_()


def test_nan_that_no_scaler_skips_is_not_hidden() -> None:
    """The norm of a filter that is NaN is not made 1, and the tracker says so."""

    def accident(output: Tensor, number: int) -> Tensor:
        return usual(output, number) * (torch.nan if number == 2 else 1.0)

    model, tracker, held = trained(accident, 4, enabled=False)
    assert model.get_submodule("0").weight.isnan().any()
    assert [row["step"] for row in tracker.rows if row["layer"] == "0"] == [1, 2, 3, 4]
    assert {(step, found.code, found.path) for step, found in tracker.findings} == {(3, "G001", "0"), (3, "G001", "2")}
    held.undo_()
    assert model.get_submodule("0").weight.isnan().any()


# --- a rank that dies ----------------------------------------------------------------------------------

DIES, STEPS = 3, 6  # the step in which the last rank ends without a word


def _data_parallel(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def _sharded(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


WRAPS = {"DDP": _data_parallel, "FSDP2": _sharded}


def _rank(rank: int, folder: str, kind: str) -> None:
    """What one of two processes does; the second dies, the first writes what became of it."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    model = network()
    wrapped = WRAPS[kind](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty, held, tracker = watched(model, optimizer)
    error, done = "", 0
    try:
        for done in range(STEPS):
            if rank == 1 and done == DIES:
                os._exit(3)
            optimizer.zero_grad()
            (wrapped(seeded(8, 6, seed=done + 10 * rank)).square().mean() + penalty()).backward()
            optimizer.step()
    except RuntimeError as caught:
        error = str(caught)
    weight = model.get_submodule("0").weight.detach()
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    before = [copy.deepcopy(p.detach()) for p in model.parameters()]
    held.undo_()
    kept = [p.detach() for p in model.parameters()]
    torch.save(
        {
            "error": error,
            "steps": done,
            "rows": sorted({row["step"] for row in tracker.rows}),
            "norms": local.norm(dim=1).clone(),
            "finite": all(bool(_local(p).isfinite().all()) for p in kept),
            "unchanged": all(torch.equal(_local(a), _local(b)) for a, b in zip(before, kept, strict=True)),
        },
        Path(folder) / "found.pt",
    )
    os._exit(0)  # the group cannot be left in order


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRAPS)
def test_the_death_of_a_rank_ends_the_others_with_an_error(kind: str, tmp_path: Path) -> None:
    """The rank that is left raises torch's error; its weights are those of the last step, and all verbs end."""
    context = get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path), kind)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(300)
    assert [each.exitcode for each in ranks] == [0, 3]
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert "onnection" in found["error"] or "gloo" in found["error"].lower()
    assert found["steps"] == DIES
    assert found["rows"] == list(range(1, DIES + 1))
    assert found["finite"]
    assert found["unchanged"]
    torch.testing.assert_close(found["norms"], torch.full_like(found["norms"], RADIUS))


def test_a_weight_that_is_replaced_by_hand_is_let_go_with_a_warning() -> None:
    """A table that is resized gets a new Parameter, in the layer and in the optimizer."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    held = gonio.hold_(model, optimizer, norm="filters")
    old = model[0].weight
    model[0].weight = nn.Parameter(old.detach().clone())
    (group,) = optimizer.param_groups
    group["params"] = [model[0].weight if each is old else each for each in group["params"]]
    norms = [layer.weight.detach().norm(dim=1) for layer in (model[0], model[2])]
    with pytest.warns(gonio.errors.GonioWarning, match=r"does not hold 0\.weight any more: .* other Parameters"):
        step(model, optimizer)
    with warnings.catch_warnings(action="error"):
        step(model, optimizer)
    assert not torch.allclose(model[0].weight.norm(dim=1), norms[0])
    torch.testing.assert_close(model[2].weight.norm(dim=1), norms[1])
    gonio.hold_(model, optimizer, where="0", norm="filters").undo_()
    held.undo_()


REPLACED: dict[str, Callable[[nn.Module], object]] = {
    "weight": lambda model: setattr(model[0], "weight", nn.Parameter(2 * model[0].weight.detach())),
    "layer": lambda model: model.__setitem__(0, nn.Linear(6, 8)),
    "assigned": lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True),
    "torch's old weight norm": lambda model: nn.utils.weight_norm(model[0]),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("how", REPLACED)
def test_a_weight_that_the_optimizer_does_not_get_is_named_in_the_next_step(how: str, set_to_none: bool) -> None:
    """The layer has another Parameter, and the optimizer still the old one, which no gradient reaches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = gonio.hold_(model, optimizer)
    step(model, optimizer)
    REPLACED[how](model)
    optimizer.zero_grad(set_to_none=set_to_none)
    model(seeded(5, 6)).square().sum().backward()
    with pytest.warns(gonio.errors.GonioWarning, match=r"hold 0\.weight.* any more: .* steps the old ones"):
        optimizer.step()
    with warnings.catch_warnings(action="error"):
        step(model, optimizer)
    held.undo_()


def test_a_weight_that_gradients_reach_without_its_layer_is_held() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gonio.hold_(model, optimizer)
    weight = model[0].weight
    norm = weight.detach().norm()
    model[0].weight = nn.Parameter(weight.detach().clone())
    model.register_forward_hook(lambda m, x, y: y * weight.mean())
    with warnings.catch_warnings(action="error"):
        step(model, optimizer)
    torch.testing.assert_close(weight.detach().norm(), norm)


@pytest.mark.parametrize("leaves", ["optimizer", "layer"])
def test_a_weight_that_leaves_one_of_both_is_no_replaced_one(leaves: str) -> None:
    """It is not trained any more, or another name refers to it, as torch's own parametrizations do."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gonio.hold_(model, optimizer, norm="filters")
    weight = model[0].weight
    if leaves == "optimizer":
        (group,) = optimizer.param_groups
        group["params"] = [each for each in group["params"] if each is not weight]
    else:
        nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    before = weight.detach().norm(dim=1)
    with warnings.catch_warnings(action="error"):
        step(model, optimizer)
    torch.testing.assert_close(weight.norm(dim=1), before)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(seeded(5, 6)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("magnitude", [None, "learned"])
def test_a_row_for_padding_is_zero_in_a_tied_output_layer_too(magnitude: Any) -> None:
    table, output = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 9, bias=False)
    output.weight = table.weight
    model = nn.Sequential(table, output)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    held = gonio.hold_(model, optimizer, norm="filters", magnitude=magnitude)
    assert [change.path for change in held.changes] == ["1"]
    before = output._parameters["weight"].detach().norm(dim=1)
    model(torch.arange(9)).square().sum().backward()
    optimizer.step()
    after = output._parameters["weight"].detach().norm(dim=1)
    torch.testing.assert_close(after, before)
    assert after[0] == 0
    assert model(torch.arange(9)).isfinite().all()


def test_the_refusal_of_a_zero_filter_names_the_class_of_the_layer() -> None:
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(gonio.errors.NotApplicableError, match=r"cannot hold layer '0' \(Linear\): the norms of 3"):
        gonio.hold_(nn.Sequential(layer), optimizer, norm="filters", magnitude="learned")
    assert type(layer) is nn.Linear
