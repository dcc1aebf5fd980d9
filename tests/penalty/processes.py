"""What each of two gloo processes does for the tests of spread batches and sharded weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from catalog import seeded
from gonio import Penalty
from gonio import regularizers as R
from gonio.geometry.norms import whole
from ranks import WORLD, attempt

RULES: dict[str, R.Regularizer] = {
    "L2": R.L2(1.0, before_norm="keep"),
    "Orthogonality": R.Orthogonality(1.0),
    "off the diagonal": R.Orthogonality(1.0, diagonal=False),
    "unit filters": R.Orthogonality(1.0, filters="unit"),
    "DoubleOrthogonality": R.DoubleOrthogonality(1.0),
    "MutualCoherence": R.MutualCoherence(1.0),
    "SRIP": R.SRIP(1.0, iterations=2),
    "SRIP of many iterations": R.SRIP(1.0, iterations=40),
    "ConvOrthogonality": R.ConvOrthogonality(1.0),
    "energy": R.HypersphericalEnergy(1.0),
    "energy of angles": R.HypersphericalEnergy(1.0, distance="angle", half_space=True),
    "ScaleShift": R.ScaleShift(1e-2, direction_strength=0.1),
    "SelfOrthogonality": R.SelfOrthogonality(1.0),
    "SelfOrthogonality standardised": R.SelfOrthogonality(1.0, standardize=True),
    "SelfOrthogonality paper": R.SelfOrthogonality.paper(1e-3),
}


def network() -> nn.Sequential:
    """The filters of the last layer are not divisible by the number of processes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 7)
    ).double()


def batch() -> Tensor:
    return seeded(8, 3, 8, 8, dtype=torch.float64)


def train(model: nn.Module, rule: R.Regularizer, x: Tensor, *, add: bool = False) -> list[Tensor]:
    """Two steps of SGD; the penalty of each and the parameters after it."""
    penalty = Penalty(model, [(None, rule)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if add:
            loss.backward()
            penalty.add_grads_()
        else:
            (loss + penalty()).backward()
        optimizer.step()
        seen.append(torch.tensor(sum(penalty.values().values()), dtype=x.dtype))
        seen += [whole(p).detach().clone() for p in model.parameters()]
    penalty.undo_()
    return seen


def data_parallel(rule: R.Regularizer, rows: Tensor) -> list[Tensor]:
    return train(DistributedDataParallel(network()), rule, rows)


def wrapped_later(rule: R.Regularizer, rows: Tensor) -> list[Tensor]:
    """A penalty built before the wrapper, told the process group."""
    model = network()
    parallel = DistributedDataParallel(model)
    penalty = Penalty(model, [(None, rule)], process_group=dist.group.WORLD)
    (parallel(rows).square().mean() + penalty()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def sharded(rule: R.Regularizer, rows: Tensor, *, add: bool = False) -> list[Tensor]:
    model = network()
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = train(model, rule, rows, add=add)
    if not all(hasattr(p, "placements") for p in model.parameters()):
        raise TypeError("a sharded weight did not stay so")
    return found


def everything() -> dict[str, list[Tensor] | str]:
    rows = batch().chunk(WORLD)[dist.get_rank()]
    found: dict[str, list[Tensor] | str] = {}
    for name, rule in RULES.items():
        found[f"ddp {name}"] = attempt(lambda rule=rule: data_parallel(rule, rows))
        found[f"fsdp {name}"] = attempt(lambda rule=rule: sharded(rule, rows))
        if isinstance(rule, R.WeightRegularizer):
            found[f"fsdp add {name}"] = attempt(lambda rule=rule: sharded(rule, rows, add=True))
    found["ddp later"] = attempt(lambda: wrapped_later(RULES["SelfOrthogonality"], rows))
    return found
