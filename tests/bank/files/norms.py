"""Weights that a norm, a mask or another parametrization computes: torch's old hooks, its parametrizations, pruning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from bank.files.case import Case, File, floats, stored
from gonio import parametrizations as P
from gonio.surgery import parametrize_

old, new = nn.utils, nn.utils.parametrizations
UNKNOWN = "a part of a parametrization that is not read"


def _built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make().eval()


def _renewed(model: nn.Module) -> nn.Module:
    """What a forward does before it: the old hooks compute their weights."""
    with torch.no_grad():
        for module in model.modules():
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
    return model


def normed(
    make: Callable[[], nn.Module],
    *names: str,
    refused: str = "",
    dtype: torch.dtype = torch.float32,
    folds: bool = True,
) -> Callable[[Path], File]:
    """A layer whose own parameters were trained: three times what they were.

    Args:
        names: of the weights that are computed, `weight` by default.
        refused: the reason why they are not read.
    """
    names = names or ("weight",)

    def file(folder: Path) -> File:
        model = _built(make).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        twin = _built(make).double()
        twin.load_state_dict(model.state_dict())
        _renewed(twin)
        expected = {f"net.{name}": _of(twin, name) for name in names}
        rest = floats({f"net.{k}": v for k, v in model.state_dict().items() if not _is_part(k, names)})
        source = stored(folder, {f"net.{k}": v for k, v in model.state_dict().items() if isinstance(v, Tensor)})
        said = {f"net.{part}": refused for part in model.state_dict() if part.endswith("original")} if refused else {}
        folded = nn.ModuleDict({"net": _renewed(_built(make).to(dtype))}) if folds and not refused else None
        if folded is not None:
            folded.load_state_dict({f"net.{k}": v for k, v in model.state_dict().items()})
        exact = 2e-6 if dtype is torch.float32 else 1e-2
        return File(
            source=source,
            weights=rest if refused else {**rest, **expected},
            refused=said,
            exact=exact,
            folded=folded,
            live=folded,
        )

    return file


def _of(model: nn.Module, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    value: Any = getattr(model.get_submodule(path), last)
    return value.detach().double()


def _is_part(key: str, names: tuple[str, ...]) -> bool:
    return "parametrizations" in key or any(key.startswith(f"{n}_") for n in names)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def _registered(layer: nn.Module, *parts: nn.Module) -> nn.Module:
    for part in parts:
        parametrize.register_parametrization(layer, "weight", part)
    return layer


def _stepped(layer: nn.Module) -> nn.Module:
    """After a few forwards in training mode, each with a step of the power iteration."""
    for _ in range(5):
        _renewed(layer.train())
    return layer


def _never_ran(folder: Path) -> File:
    state = {f"net.{k}": v for k, v in _built(lambda: old.spectral_norm(nn.Linear(16, 16))).state_dict().items()}
    return File(source=stored(folder, state), refused={"net.weight": "which dimension holds the outputs is not known"})


def _twice(layer: nn.Module) -> nn.Module:
    prune.random_unstructured(layer, "weight", 0.3)
    return prune.l1_unstructured(layer, "weight", 0.2)


def _global(model: nn.Sequential) -> nn.Module:
    pairs = [(model[0], "weight"), (model[1], "weight")]
    prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=0.4)
    return model


def _removed(layer: nn.Module) -> nn.Module:
    return prune.remove(prune.l1_unstructured(layer, "weight", 0.4), "weight")


def _biased(layer: nn.Module) -> nn.Module:
    prune.random_unstructured(layer, "weight", 0.3)
    return prune.random_unstructured(layer, "bias", 0.3)


def _own(part: Callable[[], Any], make: Callable[[], nn.Module] = lambda: nn.Linear(16, 8)) -> Callable[[], nn.Module]:
    def layer() -> nn.Module:
        made = nn.Sequential(make())
        parametrize_(made, part())
        return made[0]

    return layer


WN, SN, WNP, SNP = (
    "torch.nn.utils.weight_norm",
    "torch.nn.utils.spectral_norm",
    "torch parametrizations.weight_norm",
    ("torch parametrizations.spectral_norm"),
)
PRUNE, OWN, TORCH = "torch.nn.utils.prune", "gonio.parametrizations", "torch parametrizations"

CASES: dict[str, Case] = {
    "weight norm, old": Case(WN, normed(lambda: old.weight_norm(nn.Conv1d(16, 32, 7)))),
    "weight norm of a linear layer, old": Case(WN, normed(lambda: old.weight_norm(nn.Linear(16, 32)))),
    "weight norm of the whole, old": Case(WN, normed(lambda: old.weight_norm(nn.Linear(16, 32), dim=None))),
    "weight norm of inputs, old": Case(WN, normed(lambda: old.weight_norm(nn.Linear(16, 32), dim=1))),
    "weight norm of the last dimension, old": Case(WN, normed(lambda: old.weight_norm(nn.Conv1d(16, 32, 7), dim=2))),
    "weight norm of one output, old": Case(WN, normed(lambda: old.weight_norm(nn.Linear(16, 1)))),
    "weight norm of a transposed layer, old": Case(WN, normed(lambda: old.weight_norm(nn.ConvTranspose1d(8, 4, 4)))),
    "weight norm in half precision, old": Case(
        WN, normed(lambda: old.weight_norm(nn.Conv1d(16, 32, 7)), dtype=torch.bfloat16)
    ),
    "weight norm of an LSTM, old": Case(
        WN, normed(lambda: old.weight_norm(nn.LSTM(6, 5), "weight_hh_l0"), "weight_hh_l0", folds=False)
    ),
    "weight norm, new": Case(WNP, normed(lambda: new.weight_norm(nn.Conv2d(4, 8, 3)))),
    "weight norm of the whole, new": Case(WNP, normed(lambda: new.weight_norm(nn.Linear(16, 32), dim=None))),
    "weight norm of a transposed layer, new": Case(
        WNP, normed(lambda: new.weight_norm(nn.ConvTranspose1d(4, 8, 3), dim=1))
    ),
    "weight norm of an embedding, new": Case(WNP, normed(lambda: new.weight_norm(nn.Embedding(20, 8)))),
    "spectral norm, old": Case(SN, normed(lambda: old.spectral_norm(nn.Conv1d(16, 32, 7)))),
    "spectral norm of a square layer, old": Case(SN, normed(lambda: _stepped(old.spectral_norm(nn.Linear(16, 16))))),
    "spectral norm of a square layer that never ran, old": Case(SN, _never_ran),
    "spectral norm of a square transposed layer, old": Case(
        SN, normed(lambda: _stepped(old.spectral_norm(nn.ConvTranspose2d(8, 8, 3))))
    ),
    "spectral norm of inputs, old": Case(SN, normed(lambda: old.spectral_norm(nn.Linear(16, 8), dim=1))),
    "spectral norm, new": Case(SNP, normed(lambda: new.spectral_norm(nn.Conv2d(4, 8, 3)))),
    "spectral norm of a transposed layer, new": Case(
        SNP, normed(lambda: new.spectral_norm(nn.ConvTranspose2d(4, 8, 3)))
    ),
    "spectral norm of a linear layer, new": Case(SNP, normed(lambda: new.spectral_norm(nn.Linear(16, 16)))),
    "spectral norm by many iterations, new": Case(
        SNP, normed(lambda: new.spectral_norm(nn.Linear(16, 8), n_power_iterations=5))
    ),
    "orthogonal by Householder reflections": Case(
        TORCH, normed(lambda: new.orthogonal(nn.Linear(16, 8)), refused=UNKNOWN)
    ),
    "orthogonal by a matrix exponential": Case(
        TORCH, normed(lambda: new.orthogonal(nn.Linear(8, 8), orthogonal_map="matrix_exp"), refused=UNKNOWN)
    ),
    "orthogonal by a Cayley map, of a convolution": Case(
        TORCH, normed(lambda: new.orthogonal(nn.Conv2d(4, 8, 1), orthogonal_map="cayley"), refused=UNKNOWN)
    ),
    "a parametrization of the user": Case(
        TORCH, normed(lambda: _registered(nn.Linear(8, 8), Symmetric()), refused=UNKNOWN)
    ),
    "two parametrizations of the user": Case(
        TORCH, normed(lambda: _registered(nn.Linear(8, 8), Symmetric(), Doubled()), refused=UNKNOWN)
    ),
    "spectral norm after another parametrization": Case(
        TORCH, normed(lambda: new.spectral_norm(_registered(nn.Linear(16, 8), Doubled())), refused=UNKNOWN)
    ),
    "pruned at random": Case(PRUNE, normed(lambda: prune.random_unstructured(nn.Linear(16, 32), "weight", 0.3))),
    "pruned by size": Case(PRUNE, normed(lambda: prune.l1_unstructured(nn.Conv1d(8, 16, 3), "weight", 0.5))),
    "pruned twice": Case(PRUNE, normed(lambda: _twice(nn.Linear(16, 32)))),
    "pruned over all layers": Case(
        PRUNE,
        normed(lambda: _global(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))), "0.weight", "1.weight"),
    ),
    "pruned weight and bias": Case(PRUNE, normed(lambda: _biased(nn.Conv2d(4, 8, 3)))),
    "pruned and removed": Case(PRUNE, normed(lambda: _removed(nn.Linear(16, 32)), folds=False)),
    "pruned by inputs": Case(PRUNE, normed(lambda: prune.ln_structured(nn.Conv2d(4, 8, 3), "weight", 0.5, n=1, dim=1))),
    "pruned LSTM": Case(
        PRUNE, normed(lambda: prune.l1_unstructured(nn.LSTM(6, 5), "weight_ih_l0", 0.4), "weight_ih_l0", folds=False)
    ),
    "gonio's weight norm": Case(OWN, normed(_own(P.WeightNorm))),
    "gonio's spectral norm": Case(OWN, normed(_own(P.SpectralNorm))),
    "gonio's orthogonal weight": Case(OWN, normed(_own(P.Orthogonal))),
    "gonio's weight standardization": Case(OWN, normed(_own(P.WeightStandardization, lambda: nn.Conv2d(4, 8, 3)))),
    "gonio's sphere": Case(OWN, normed(_own(P.Sphere))),
}
