"""Laws of training with a spectral norm: the norm is kept without further calls, and only changes move its state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import gonio
from catalog import seeded
from gonio import parametrizations as P
from ranks import WORLD, group, spawned

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD 0.1 with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
}


def network(seed: int = 0) -> nn.Sequential:
    """Convolutions with a smaller side of 1 to 32, and a linear layer of 80, which is searched in a subspace."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 80),
        nn.ReLU(),
        nn.Linear(80, 10),
    )


def normalised(**options: object) -> nn.Sequential:
    model = network()
    gonio.parametrize_(model, P.SpectralNorm(**options), where=(nn.Conv2d, nn.Linear))
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    return seeded(8, 1, 8, 8, seed=step), torch.arange(8) % 10


def loss_of(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    images, labels = batch(step)
    return nn.functional.cross_entropy(model(images), labels)


def raws(model: nn.Module) -> list[nn.Parameter]:
    return [m._parameters["weight"] for m in model.modules() if P.is_parametrized(m)]


def norms(model: nn.Module) -> list[float]:
    """The largest singular value of each effective weight, from its Gram matrix in float64."""
    weights = [m.weight.detach().double().flatten(1) for m in model.modules() if P.is_parametrized(m)]
    return [float(torch.linalg.eigvalsh(weight @ weight.T)[-1]) ** 0.5 for weight in weights]


def assert_kept(model: nn.Module, tolerance: float = 0.01) -> None:
    assert norms(model) == pytest.approx([1.0] * len(norms(model)), abs=tolerance)


def vectors(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def step_(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.step()


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_norm_is_kept_after_each_of_300_steps(name: str) -> None:
    model = normalised()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for number in range(300):
        step_(model, optimizer, number)
        assert_kept(model)


# --- ways of training: the norm of each weight with which a forward computed, read by hooks in that forward ---------


def seen(model: nn.Module) -> list[float]:
    """The list to which each forward of a normalised layer adds the norm of the weight that it used."""
    found: list[float] = []
    for layer in model.modules():
        if P.is_parametrized(layer):
            layer.register_forward_hook(lambda layer, _, __: found.extend(norms(layer)))
    return found


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    step_(model, optimizer, number)


def checkpointed(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=number % 2 == 0), number).backward()
    optimizer.step()


def adversarially(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A critic's step: real and false images, in two forwards, and a third through which another model learns."""
    optimizer.zero_grad()
    (real, _), (false, _) = batch(2 * number), batch(2 * number + 1)
    (nn.functional.relu(1 - model(real)[:, 0]) + nn.functional.relu(1 + model(false)[:, 0])).mean().backward()
    optimizer.step()
    torch.autograd.grad(-model(false.requires_grad_())[:, 0].mean(), false)


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    for part in range(3):
        (loss_of(model, 3 * number + part) / 3).backward()
    optimizer.step()


def skipping(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Each third step overflows, and a gradient scaler leaves it out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, number)).backward()
    before = [raw.detach().clone() for raw in raws(model)]
    if number % 3 == 0:
        raws(model)[0].grad.fill_(torch.inf)
    scaler.step(optimizer)
    assert equal(before, raws(model)) == (number % 3 == 0)


def reloading(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Each fifth step goes back to the state of a copy that made two steps more."""
    step_(model, optimizer, number)
    if number % 5 == 4:
        ahead = copy.deepcopy(model)
        other = OPTIMIZERS["SGD 0.1 with momentum"](list(ahead.parameters()))
        for extra in range(2):
            step_(ahead, other, 100 + extra)
        model.load_state_dict(ahead.state_dict())


WAYS = {way.__name__: way for way in (plainly, checkpointed, adversarially, accumulating, skipping, reloading)}


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "fused AdamW"])
@pytest.mark.parametrize("way", WAYS)
def test_every_forward_of_a_training_uses_weights_of_the_norm(way: str, optimizer: str) -> None:
    model = normalised()
    found, steps = seen(model), OPTIMIZERS[optimizer](list(model.parameters()))
    for number in range(25):
        WAYS[way](model, steps, number)
    assert len(found) >= 25 * len(norms(model))
    assert found == pytest.approx([1.0] * len(found), abs=0.01)


@pytest.mark.parametrize("way", WAYS)
def test_the_law_of_ways_refuses_vectors_that_stay(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = normalised()
    monkeypatch.setattr(P.SpectralNorm, "_follow_", lambda self, raw: None)
    found, steps = seen(model), OPTIMIZERS["SGD 0.1 with momentum"](list(model.parameters()))
    for number in range(25):
        WAYS[way](model, steps, number)
    assert max(found) > 1.01


def _distributed() -> dict[str, list[float]]:
    """The norms that the forwards of each rank used: DDP on different batches, FSDP 2 on one."""
    found: dict[str, list[float]] = {}
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    for name in ("DDP", "FSDP 2"):
        model = normalised()
        wrapped = DistributedDataParallel(model) if name == "DDP" else fully_shard(model, mesh=mesh)
        found[name] = seen(model)
        optimizer = OPTIMIZERS["SGD 0.1 with momentum"](list(model.parameters()))
        for number in range(25):
            step_(wrapped, optimizer, WORLD * number + (dist.get_rank() if name == "DDP" else 0))
    return found


@pytest.mark.slow
def test_every_forward_of_several_processes_uses_weights_of_the_norm(tmp_path: Path) -> None:
    for rank in spawned(_distributed, tmp_path):
        for name, found in rank.items():
            assert len(found) == 25 * len(norms(normalised())), name
            assert found == pytest.approx([1.0] * len(found), abs=0.01), name


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_the_norm_of_shards_is_kept_by_every_kind_of_step(options: dict[str, bool], tmp_path: Path) -> None:
    """Torch does not count changes by operations on lists of shards, the default of its optimizers on accelerators."""
    with group(tmp_path):
        model = normalised()
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        found, optimizer = seen(model), torch.optim.AdamW(model.parameters(), lr=0.01, **options)
        for number in range(25):
            step_(model, optimizer, number)
    assert found == pytest.approx([1.0] * len(found), abs=0.01)


def test_the_control_without_its_own_steps_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(P.SpectralNorm, "_follow_", lambda self, raw: None)
    model = normalised()
    optimizer = OPTIMIZERS["SGD 0.1 with momentum"](list(model.parameters()))
    for number in range(30):
        step_(model, optimizer, number)
    assert max(norms(model)) > 1.02


def test_the_bound_of_the_convolution_is_kept() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 10))
    gonio.parametrize_(model, P.SpectralNorm(view="conv"), where=nn.Conv2d)
    optimizer = OPTIMIZERS["SGD 0.1 with momentum"](list(model.parameters()))
    for number in range(60):
        step_(model, optimizer, number)
        for layer in (model[0], model[2]):
            assert 0.95 <= P.parametrization_of(layer).measured(layer.weight.detach()) <= 1.01


def test_only_a_change_of_the_weight_moves_the_vectors() -> None:
    """Second forwards, accumulation, reads, evaluation and skipped steps do not; a step does, once."""
    model = normalised()
    optimizer = OPTIMIZERS["SGD 0.1 with momentum"](list(model.parameters()))
    step_(model, optimizer, 0)
    before = vectors(model)
    loss_of(model, 1).backward()
    after = vectors(model)
    assert not equal(before, after)
    (loss_of(model, 2) + loss_of(model, 3)).backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    raws(model)[0].grad.fill_(torch.inf)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    loss_of(model, 4)
    model.eval()
    loss_of(model, 5)
    model.train()
    [m.weight for m in model.modules() if P.is_parametrized(m)]
    assert equal(after, vectors(model))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_gradients_are_bit_equal(reentrant: bool) -> None:
    plain = normalised()
    recomputed = copy.deepcopy(plain)
    for model, call in ((plain, plain), (recomputed, lambda x: checkpoint(recomputed, x, use_reentrant=reentrant))):
        optimizer = OPTIMIZERS["SGD 0.1 with momentum"](list(model.parameters()))
        for number in range(4):
            optimizer.zero_grad()
            images, labels = batch(number)
            nn.functional.cross_entropy(call(images.requires_grad_()), labels).backward()
            optimizer.step()
    assert equal(list(plain.parameters()), list(recomputed.parameters()))
    assert equal(vectors(plain), vectors(recomputed))


def test_an_averaged_copy_has_the_norm() -> None:
    """Its vectors stay those of the copy; in evaluation mode each weight is divided by its own norm."""
    model = normalised()
    average, mine = AveragedModel(model).eval(), copy.deepcopy(model).eval()
    start = vectors(mine)
    optimizer = OPTIMIZERS["SGD 0.1 with momentum"](list(model.parameters()))
    for number in range(20):
        step_(model, optimizer, number)
        average.update_parameters(model)
        with torch.no_grad():
            torch._foreach_lerp_(list(mine.parameters()), list(model.parameters()), 0.1)
    assert_kept(mine)
    assert_kept(average)
    assert equal(start, vectors(mine))


def test_freezing_and_thawing() -> None:
    model = normalised()
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
    for number in range(30):
        for raw in raws(model):
            raw.requires_grad_(number % 3 > 0)
        step_(model, optimizer, number)
        assert_kept(model)


@pytest.mark.parametrize("mode", [True, False])
def test_a_state_dict_of_the_middle_of_a_training_loads(mode: bool) -> None:
    """Saved after a step, when the vectors are those of the weight before it."""
    model = normalised()
    optimizer = OPTIMIZERS["SGD 0.1 with momentum"](list(model.parameters()))
    for number in range(10):
        step_(model, optimizer, number)
    other = normalised()
    with torch.no_grad():
        for raw in raws(other):
            raw.mul_(3)
    other.load_state_dict(model.state_dict())
    images = batch(50)[0]
    torch.testing.assert_close(other.train(mode)(images), model.train(mode)(images))
    assert_kept(other)


def test_copies_know_whether_their_vectors_are_current() -> None:
    model = normalised()
    optimizer = OPTIMIZERS["SGD 0.1 with momentum"](list(model.parameters()))
    step_(model, optimizer, 0)
    stale = copy.deepcopy(model)
    assert_kept(stale)
    before = vectors(stale)
    current = copy.deepcopy(stale)
    norms(current)
    assert equal(before, vectors(current))


def test_functional_calls_with_other_weights_change_nothing() -> None:
    model = normalised()
    before = vectors(model)
    others = {name: p.detach() + 0.1 for name, p in model.named_parameters()}
    torch.func.functional_call(model, others, (batch(0)[0],))
    assert equal(before, vectors(model))


@pytest.mark.parametrize("steps", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_compiled_training_keeps_the_norm_in_one_graph(steps: int) -> None:
    torch._dynamo.reset()
    model = normalised()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = OPTIMIZERS["SGD 0.1 with momentum"](list(model.parameters()))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(steps):
            optimizer.zero_grad()
            loss_of(compiled, number).backward()
            optimizer.step()
            if steps > 8:  # of a copy: a read in training mode would advance the vectors once more
                assert_kept(copy.deepcopy(model).eval())
    assert_kept(model.eval())
