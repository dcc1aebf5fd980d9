"""Copies and processes: each copy is complete, and detaching one does not change the others."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import gonio
from catalog import seeded
from gonio import parametrizations as P
from gonio.geometry.norms import whole
from laws.support import reloaded
from parametrizations.layers import LAYERS, MEMBERS, make, parametrized, sample
from ranks import WORLD, group, spawned
from tolerances import close


def model_of(member: str) -> nn.Module:
    model = nn.Sequential(make("conv2d"), nn.ReLU(), make("transposed conv2d").requires_grad_(False))
    model[2] = nn.Conv2d(6, 3, 1)
    for layer in (model[0], model[2]):
        P.attach(layer, "weight", MEMBERS[member].make())
    return model


def through_cloudpickle(model: nn.Module) -> nn.Module:
    """What process pools other than torch's send."""
    cloudpickle = pytest.importorskip("cloudpickle", reason="comes with joblib")
    return pickle.loads(cloudpickle.dumps(model))


def through_joblib(model: nn.Module) -> nn.Module:
    joblib = pytest.importorskip("joblib", reason="comes with scikit-learn")
    file = io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    return joblib.load(file)


TRIPS = {
    "deepcopy": copy.deepcopy,
    "pickle protocol 2": lambda m: pickle.loads(pickle.dumps(m, protocol=2)),
    "torch.save": partial(reloaded, weights_only=False),
    "AveragedModel": lambda m: AveragedModel(m).module,
    "cloudpickle": through_cloudpickle,
    "joblib": through_joblib,
}


@pytest.mark.parametrize("trip", TRIPS)
@pytest.mark.parametrize("member", MEMBERS)
def test_detaching_a_copy_leaves_the_original(member: str, trip: str) -> None:
    model = model_of(member)
    x = sample(model[0])
    expected = model(x)
    twin = TRIPS[trip](model)
    assert torch.equal(twin(x), expected)
    for layer in (twin[0], twin[2]):
        P.detach(layer, "weight", keep="weight")
    torch.testing.assert_close(twin(x), expected)
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert all(p.grad is None for p in twin.parameters())


def _in_a_child(rank: int, models: list[nn.Module], x: Tensor, folder: str) -> None:
    torch.save([model(x).detach() for model in models], Path(folder) / f"{rank}.pt")


@pytest.mark.slow
def test_spawn_sends_models(tmp_path: Path) -> None:
    models = [model_of(member) for member in MEMBERS]
    x = sample(models[0][0])
    spawn(_in_a_child, args=(models, x, str(tmp_path)), nprocs=1)
    for output, model in zip(torch.load(tmp_path / "0.pt", weights_only=True), models, strict=True):
        assert torch.equal(output, model(x))


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("member", MEMBERS)
def test_averages_of_models(member: str, use_buffers: bool) -> None:
    model = model_of(member)
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averaged = AveragedModel(model, multi_avg_fn=ema, use_buffers=use_buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = sample(model[0])
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
    assert bool(averaged(x).isfinite().all())
    fresh = AveragedModel(model_of(member))
    fresh.load_state_dict(averaged.state_dict())
    assert torch.equal(fresh(x), averaged(x))


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_data_parallel_replicas_read_their_own_tensors(name: str) -> None:
    """A replica has views in the place of Parameters; no GPU is needed to make one."""
    layer = make(name)
    P.attach(layer, "weight", P.Sphere())
    replica = layer._replicate_for_data_parallel()
    view = seeded(*layer._parameters["weight"].shape, seed=11)
    replica.weight = view
    replica.bias = layer.bias.detach()
    assert torch.equal(replica.weight, P.Sphere().forward(view))
    assert list(LAYERS[name]().state_dict()) == [key for key in layer.state_dict() if "_param" not in key]


# --- two processes: ticks under data parallelism and sharding ---------------------------------------


STEPS = 4


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(seeded(*parameter.shape, seed=index))
    for layer, parametrization in zip((0, 2, 4), (P.SpectralNorm(), P.SpectralNorm(), P.WeightNorm()), strict=True):
        P.attach(model[layer], "weight", parametrization)
    return model


def train(model: nn.Module, source: nn.Module, rows: slice) -> list[Tensor]:
    """Effective outputs after some steps, each on the given rows of a batch of 8."""
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(seeded(8, 6, seed=50 + step)[rows]).square().mean().backward()
        optimizer.step()
    return [model(seeded(8, 6, seed=9)).detach(), *(b.clone() for b in source.buffers())]


def read_and_loaded(layer: nn.Module, *, sharded: bool) -> list[Tensor]:
    """The effective weight of a layer and its gradient, before and after a checkpoint is saved and loaded."""
    model, cotangent = nn.Sequential(layer), seeded(*layer.weight.shape, seed=7)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    options, found = StateDictOptions(full_state_dict=True), []
    for _ in range(2):
        model.zero_grad()
        weight = whole(layer.weight)
        (weight * cotangent).sum().backward()
        found += [weight.detach().clone(), whole(layer._parameters["weight"].grad).clone()]
        set_model_state_dict(model, get_model_state_dict(model, options=options), options=options)
    return [*found, model(sample(layer)).detach()]


def everything() -> dict[str, list[Tensor]]:
    each, rank = 8 // WORLD, dist.get_rank()
    rows = slice(each * rank, each * (rank + 1))
    found = {}
    model = network()
    found["ddp"] = train(DistributedDataParallel(model), model, rows)
    model = network()
    compiled = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    found["compiled ddp"] = train(compiled, model, rows)
    model = network()
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=mesh)
    found["fsdp"] = train(model, model, rows)
    for member in MEMBERS:
        found[member] = read_and_loaded(parametrized(member, "conv2d"), sharded=True)
    return found


@pytest.mark.slow
def test_several_processes_equal_one(tmp_path: Path) -> None:
    """Training with ticks under DDP and FSDP 2; reading, saving and loading a sharded layer."""
    model = network()
    trained = train(model, model, slice(None))
    assert not torch.equal(trained[1], network()[0].weight_parametrization.u)
    expected = dict.fromkeys(("ddp", "compiled ddp", "fsdp"), trained)
    expected |= {member: read_and_loaded(parametrized(member, "conv2d"), sharded=False) for member in MEMBERS}
    for found in spawned(everything, tmp_path):
        assert found.keys() == expected.keys()
        for how, tensors in found.items():
            for mine, one in zip(tensors, expected[how], strict=True):
                torch.testing.assert_close(mine, one, msg=how, **close(torch.float32))


def penalised_gradient(layer: nn.Module) -> Tensor:
    """That of a penalty in a backward pass, to which one of a loss is added."""
    penalty = gonio.Penalty(layer, [(None, gonio.regularizers.HypersphericalEnergy(0.1))])
    penalty().backward()
    layer(sample(layer)).square().mean().backward()
    raw = layer._parameters["weight"]
    assert getattr(raw.grad, "placements", None) == getattr(raw, "placements", None)
    return whole(raw.grad).clone()


@pytest.mark.parametrize("member", MEMBERS)
def test_a_penalty_and_a_loss_of_a_sharded_layer(member: str, tmp_path: Path) -> None:
    """FSDP 2 adds shards of its gradient to the one that is there, which has to be sharded as the Parameter is."""
    expected = penalised_gradient(parametrized(member, "conv2d"))
    with group(tmp_path):
        layer = parametrized(member, "conv2d")
        found = penalised_gradient(fully_shard(layer, mesh=init_device_mesh("cpu", (1,))))
    torch.testing.assert_close(found, expected, **close(torch.float32))
