"""Cases of the verbs, with the small networks that they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from catalog.cases import VerbCase, seeded
from gonio import init, optim
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio import surgery as S
from gonio.recipes import Recipe


def _small_network() -> nn.Module:
    """What every verb can act on: a convolution, a batch norm, activations and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 5 * 5, 6),
        nn.LeakyReLU(),
        nn.Linear(6, 3),
    )


def _network_with_faults() -> nn.Module:
    """Once `perturbed` has added its noise, one filter of each hidden layer is 0, and another one is a copy."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        for layer in (model[0], model[3]):
            for parameter in (layer.weight, layer.bias):
                noise = 0.1 * seeded(*parameter.shape, seed=1)
                parameter[1] = -noise[1]
                parameter[3] = parameter[2] + (noise[2] - noise[3])
    return model


def _network_out_of_scale() -> nn.Module:
    """One filter is 100 times as large as the batch norm behind it stores."""
    model = _small_network()
    S.calibrate_(model, [_images()])
    with torch.no_grad():
        model[0].weight[1] *= 100
    return model


def _decoupled_network() -> nn.Module:
    return nn.Sequential(
        gnn.DecoupledConv2d(2, 4, 3, padding=1, magnitude=gnn.magnitude.Ball(learn_radius=True)),
        nn.ReLU(),
        nn.Flatten(),
        gnn.DecoupledLinear(4 * 5 * 5, 3),
    )


def _images() -> Tensor:
    return seeded(4, 2, 5, 5)


def _verb(name: str, apply: Callable[[nn.Module], Any], **options: Any) -> VerbCase:
    return VerbCase(**{"name": name, "model": _small_network, "inputs": _images, "apply": apply, **options})


def _attention_network() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), nn.Linear(8, 3))


class _SeparateHeads(nn.Module):
    """Attention of two heads of 4, whose queries, keys and values come from linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.values, self.write = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.read(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        v = self.values(x).unflatten(-1, (2, 4)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.write(y.transpose(1, 2).flatten(2))


def _network_of_separate_heads() -> nn.Module:
    return nn.Sequential(_SeparateHeads(), nn.LayerNorm(8), nn.Linear(8, 3))


def _network_with_gains() -> nn.Module:
    block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(block, nn.LayerNorm(8), nn.Linear(8, 3))
    for seed, norm in enumerate((block.norm1, block.norm2, model[1])):
        norm.weight.data += 0.1 * seeded(8, seed=seed)
    return model


class _Residual(nn.Module):
    """A stream of 8 channels, which norms without gains read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8, elementwise_affine=False), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


def _network_with_a_stream() -> nn.Module:
    norm = nn.LayerNorm(8, elementwise_affine=False)
    return nn.Sequential(nn.Linear(8, 8), _Residual(), _Residual(), norm, nn.Linear(8, 3))


def _tokens() -> Tensor:
    return seeded(3, 5, 8)


def _held_network() -> nn.Module:
    model = _small_network()
    optim.hold_(model, _optimizer(model))
    return model


_OPTIMIZERS: WeakKeyDictionary[nn.Module, torch.optim.Optimizer] = WeakKeyDictionary()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """One that lives as long as the model: a hold ends with its optimizer. For what is no model, any optimizer."""
    if not isinstance(model, nn.Module):
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    return _OPTIMIZERS.setdefault(model, torch.optim.SGD(model.parameters(), lr=1e-3))


_RECIPE = {"name": "laws", "swap": [{"where": "type:BatchNorm2d", "use": "SwitchableNorm2d"}]}

VERBS = [
    _verb("init_", lambda m: S.init_(m, init.orthogonal_, gain=1.0), idempotent=True),
    _verb(
        "init_ depth_scaled",
        lambda m: S.init_(m, init.xavier_, depth_scaled=S.anatomy(m, example=_tokens())),
        model=_attention_network,
        inputs=_tokens,
        idempotent=True,
    ),
    _verb("lsuv_", lambda m: S.lsuv_(m, _images()), idempotent=True),
    _verb("calibrate_", lambda m: S.calibrate_(m, [_images()]), idempotent=True),
    _verb("shrink_intruders_ all", lambda m: S.shrink_intruders_(m, m, k=99, threshold=2, factor=0), idempotent=True),
    _verb("shrink_change_ to the base", lambda m: S.shrink_change_(m, m, factor=0.0), idempotent=True),
    _verb("even_out_", lambda m: S.even_out_(m), model=_network_out_of_scale, idempotent=True),
    _verb(
        "match_statistics_",
        lambda m: S.match_statistics_(m, [_images()]),
        model=_network_out_of_scale,
        idempotent=True,
    ),
    _verb("balance_ neuron", lambda m: S.balance_(m), keeps_function=True, idempotent=True),
    _verb("balance_ layer", lambda m: S.balance_(m, level="layer"), keeps_function=True, idempotent=True),
    *[
        _verb(
            f"balance_ {level} of blocks",
            lambda m, level=level: S.balance_(m, level=level),
            model=_attention_network,
            inputs=_tokens,
            keeps_function=True,
            idempotent=True,
        )
        for level in ("neuron", "layer")
    ],
    _verb("recycle_", lambda m: S.recycle_(m), model=_network_with_faults, keeps_function=True, idempotent=True),
    _verb("fold_", lambda m: S.fold_(m), keeps_function=True),
    _verb(
        "fold_ gains",
        lambda m: S.fold_(m, gains=True),
        model=_network_with_gains,
        inputs=_tokens,
        keeps_function=True,
    ),
    _verb(
        "rotate_ values",
        lambda m: S.rotate_(m, ("values",)),
        model=_attention_network,
        inputs=_tokens,
        keeps_function=True,
        idempotent=True,
    ),
    _verb(
        "rotate_ stream",
        lambda m: S.rotate_(m, ("stream",)),
        model=_network_with_a_stream,
        inputs=_tokens,
        keeps_function=True,
        idempotent=True,
    ),
    _verb("hold_ initial", lambda m: optim.hold_(m, _optimizer(m)), keeps_function=True),
    _verb(
        "hold_ spectral norms",
        lambda m: optim.hold_(m, _optimizer(m), norm="spectral"),
        keeps_function=True,
    ),
    _verb(
        "clip_qk_",
        lambda m: optim.clip_qk_(m, _optimizer(m)),
        model=_attention_network,
        inputs=_tokens,
        keeps_function=True,
    ),
    _verb("release_", lambda m: optim.release_(m), model=_held_network, keeps_function=True),
    _verb("apply_ a recipe", lambda m: Recipe.from_dict(_RECIPE).apply_(m)),
    _verb(
        "hold_ learned magnitudes",
        lambda m: optim.hold_(m, _optimizer(m), where="[46]", norm="filters", radius=2.0, magnitude="learned"),
        keeps_function=True,
    ),
    _verb("project_weights_", gnn.project_weights_, model=_decoupled_network, keeps_function=True, idempotent=True),
    _verb(
        "convert_gradually_",
        lambda m: S.convert_gradually_(m, _optimizer(m), steps=5),
        model=_decoupled_network,
    ),
    _verb("swap_ decoupled", lambda m: S.swap_(m, gnn.DecoupledConv2d.from_conv)),
    _verb("swap_ switchable", lambda m: S.swap_(m, gnn.SwitchableNorm2d.from_batch_norm)),
    _verb("swap_ group norm", lambda m: S.swap_(m, gnn.to_group_norm)),
    _verb("swap_ layer norm", lambda m: S.swap_(m, gnn.to_layer_norm, positions=(5, 5))),
    _verb(
        "swap_ qk_norm",
        lambda m: S.swap_(m, S.qk_norm(m, example=_tokens())),
        model=_network_of_separate_heads,
        inputs=_tokens,
    ),
    *[
        _verb(f"parametrize_ {kind.__name__}", lambda m, kind=kind: S.parametrize_(m, kind()))
        for kind in (P.WeightNorm, P.Sphere, P.SpectralNorm, P.Orthogonal, P.OrthogonalConv, P.WeightStandardization)
    ],
]
