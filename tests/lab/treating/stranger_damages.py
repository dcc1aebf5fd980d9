"""Damages of trained networks as they happen in the field, written down before the rules were read.

Each function damages a healthy network in place, as a conversion, a merge, a copy or a training can.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lab.treating.stranger_networks import base_of, given, healthy, trained

Damage = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Case:
    network: str
    damage: Damage

    @property
    def name(self) -> str:
        return f"{self.network}-{self.damage.__name__}"

    def damaged(self, seed: int = 0) -> nn.Module:
        model = copy.deepcopy(healthy(self.network, seed))
        with torch.no_grad():
            self.damage(model)
        return model


CASES: list[Case] = []


def happens_to(*networks: str) -> Callable[[Damage], Damage]:
    def listed(damage: Damage) -> Damage:
        CASES.extend(Case(network, damage) for network in networks)
        return damage

    return listed


def layers(model: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> list:
    return [module for module in model.modules() if isinstance(module, kind)]


def norms(model: nn.Module) -> list:
    return layers(model, (nn.BatchNorm1d, nn.BatchNorm2d))


def fresh(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- batch norm -----------------------------------------------------------------------------------------


@happens_to("plain", "residual")
def statistics_of_another_layer(model: nn.Module) -> None:
    """Two layers of the same width whose statistics were stored in each other's place."""
    one, other = [norm for norm in norms(model) if norm.num_features == norms(model)[-1].num_features][:2]
    kept = [one.running_mean.clone(), one.running_var.clone()]
    one.running_mean.copy_(other.running_mean), one.running_var.copy_(other.running_var)
    other.running_mean.copy_(kept[0]), other.running_var.copy_(kept[1])


@happens_to("residual", "cloud")
def deviation_stored_as_variance(model: nn.Module) -> None:
    """A framework that stores the standard deviation, converted without squaring it."""
    for norm in norms(model):
        norm.running_var.sqrt_()


@happens_to("plain")
def inverse_deviation_stored_as_variance(model: nn.Module) -> None:
    """A runtime stores 1/σ, and the export has written it where the variance belongs."""
    norm = norms(model)[1]
    norm.running_var.copy_(norm.running_var.add(norm.eps).rsqrt())


@happens_to("residual", "cloud")
def statistics_of_an_early_epoch(model: nn.Module) -> None:
    """Averaged weights, or a partial copy: the weights are the last ones, the statistics the first ones."""
    early = trained("residual" if len(norms(model)) > 4 else "cloud", epochs=1)
    for norm, old in zip(norms(model), norms(early), strict=True):
        norm.running_mean.copy_(old.running_mean), norm.running_var.copy_(old.running_var)


@happens_to("separable")
def wrong_epsilon(model: nn.Module) -> None:
    """An epsilon of another unit in the configuration: 0.3."""
    for norm in norms(model):
        norm.eps = 0.3


@happens_to("plain", "cloud")
def statistics_of_one_class(model: nn.Module) -> None:
    """Momentum 1 and a last batch that is sorted by class."""
    name = "plain" if isinstance(norms(model)[0], nn.BatchNorm2d) else "cloud"
    train = given(name).train
    model.train()
    for norm in norms(model):
        norm.momentum = 1.0
    model(train.inputs[train.targets == 3][:16])
    model.eval()
    for norm in norms(model):
        norm.momentum = 0.1


@happens_to("residual")
def gain_and_shift_exchanged(model: nn.Module) -> None:
    """γ and β read in the other order, in one layer."""
    norm = norms(model)[3]
    gain = norm.weight.clone()
    norm.weight.copy_(norm.bias), norm.bias.copy_(gain)


@happens_to("plain", "separable")
def folded_and_kept(model: nn.Module) -> None:
    """Batch norm was folded into the convolution's weights, and was left in the graph."""
    for layer, norm in list(zip(layers(model, nn.Conv2d), norms(model), strict=True))[2:4]:
        factor = norm.weight / (norm.running_var + norm.eps).sqrt()
        layer.weight.mul_(factor[:, None, None, None])


@happens_to("separable")
def folded_without_its_shift(model: nn.Module) -> None:
    """Folded into convolutions without biases: the shift is lost in one layer."""
    layer, norm = layers(model, nn.Conv2d)[3], norms(model)[3]
    layer.weight.mul_((norm.weight / (norm.running_var + norm.eps).sqrt())[:, None, None, None])
    nn.init.ones_(norm.weight), nn.init.zeros_(norm.bias), norm.reset_running_stats()


@happens_to("residual")
def variance_underflow_in_half(model: nn.Module) -> None:
    """A cast to half precision after a wrong unit: the small variances are 0."""
    for norm in norms(model):
        norm.running_var[norm.running_var < norm.running_var.median()] = 0


@happens_to("plain")
def variance_overflow_in_half(model: nn.Module) -> None:
    """Two variances are infinite."""
    norms(model)[2].running_var[:2] = torch.inf


@happens_to("cloud", "separable")
def norm_without_its_entries(model: nn.Module) -> None:
    """`strict=False`: one norm was not in the file, and is as it was built."""
    norms(model)[2].reset_parameters(), norms(model)[2].reset_running_stats()


# --- conversions of weights -----------------------------------------------------------------------------


@happens_to("dense")
def square_matrix_transposed(model: nn.Module) -> None:
    """A kernel of (in, out), square, so that nothing complained."""
    layer = layers(model, nn.Linear)[1]
    layer.weight.copy_(layer.weight.t().clone())


@happens_to("patches")
def output_projection_transposed(model: nn.Module) -> None:
    layer = model.attention[1].out
    layer.weight.copy_(layer.weight.t().clone())


@happens_to("patches")
def queries_and_values_exchanged(model: nn.Module) -> None:
    """The fused matrix was read as values, keys, queries."""
    for attention in model.attention:
        for each in (attention.qkv.weight, attention.qkv.bias):
            each.copy_(torch.cat(each.chunk(3)[::-1]))


@happens_to("reader")
def heads_interleaved(model: nn.Module) -> None:
    """The fused matrix was read head by head instead of part by part."""
    for block in model.blocks:
        weight = block.self_attn.in_proj_weight
        weight.copy_(weight.view(3, 4, 16, -1).transpose(0, 1).reshape(weight.shape).clone())


@happens_to("gated")
def gates_in_another_order(model: nn.Module) -> None:
    """Update and reset gate exchanged, as between two frameworks."""
    for each in model.rows.parameters():
        reset, update, new = each.chunk(3)
        each.copy_(torch.cat([update, reset, new]))


@happens_to("plain", "separable")
def kernels_mirrored(model: nn.Module) -> None:
    """Convolution in place of correlation."""
    for layer in layers(model, nn.Conv2d):
        layer.weight.copy_(layer.weight.flip(2, 3))


@happens_to("residual")
def height_and_width_exchanged(model: nn.Module) -> None:
    for layer in layers(model, nn.Conv2d):
        layer.weight.copy_(layer.weight.transpose(2, 3).clone())


@happens_to("cloud")
def input_channels_reversed(model: nn.Module) -> None:
    """Coordinates z, y, x in place of x, y, z (for images: BGR)."""
    model.shared[0].weight.copy_(model.shared[0].weight.flip(1))


@happens_to("plain")
def one_layer_permuted(model: nn.Module) -> None:
    """Channels aligned for a merge in one layer, and not in the next."""
    layer = layers(model, nn.Conv2d)[2]
    layer.weight.copy_(layer.weight[torch.randperm(len(layer.weight), generator=fresh())])


@happens_to("dense", "modern")
def shards_in_another_order(model: nn.Module) -> None:
    """Two halves of a column-parallel layer joined in the other order, its next layer not."""
    layer = layers(model, nn.Linear)[1]
    for each in (layer.weight, layer.bias):
        each.copy_(torch.cat(each.chunk(2)[::-1]))


@happens_to("plain")
def classes_shifted_by_one(model: nn.Module) -> None:
    """A background class was removed at the wrong end."""
    head = layers(model, nn.Linear)[-1]
    head.weight.copy_(head.weight.roll(1, 0)), head.bias.copy_(head.bias.roll(1, 0))


@happens_to("reader")
def vocabulary_shifted_by_one(model: nn.Module) -> None:
    """A special token was added in front of the vocabulary."""
    model.table.weight.copy_(model.table.weight.roll(1, 0))


@happens_to("reader", "patches")
def layers_exchanged(model: nn.Module) -> None:
    """Blocks sorted by their names as text."""
    for first, second in (model.blocks,) if hasattr(model, "blocks") else (model.attention, model.wide, model.back):
        kept = copy.deepcopy(first.state_dict())
        first.load_state_dict(second.state_dict()), second.load_state_dict(kept)


# --- copies, shards and half-loaded files ---------------------------------------------------------------


@happens_to("residual", "dense")
def truncated_tensor(model: nn.Module) -> None:
    """The last third of one tensor was not copied and is 0."""
    weight = layers(model, (nn.Conv2d, nn.Linear))[2].weight
    weight.view(-1)[2 * weight.numel() // 3 :] = 0


@happens_to("patches", "residual", "dense")
def half_loaded(model: nn.Module) -> None:
    """Two layers are at their initialisation."""
    torch.manual_seed(5)
    for layer in layers(model, (nn.Linear, nn.Conv2d))[-4:-2]:
        layer.reset_parameters()


@happens_to("residual")
def missing_key_filled_with_zeros(model: nn.Module) -> None:
    model.short[1][0].weight.zero_()


@happens_to("dense")
def biases_lost(model: nn.Module) -> None:
    for layer in layers(model, nn.Linear):
        layer.bias.zero_()


@happens_to("reader")
def tie_broken(model: nn.Module) -> None:
    """The head was tied to the table; after loading it is a matrix of its own, at its initialisation."""
    torch.manual_seed(5)
    model.head = nn.Linear(64, 256, bias=False)


@happens_to("separable")
def rows_repeated(model: nn.Module) -> None:
    """A broadcast in place of a copy: one depthwise filter in all channels."""
    layer = next(layer for layer in layers(model, nn.Conv2d) if layer.groups > 1)
    layer.weight.copy_(layer.weight[:1].expand_as(layer.weight).clone())


@happens_to("patches")
def places_reversed(model: nn.Module) -> None:
    model.place.copy_(model.place.flip(1))


@happens_to("modern")
def stale_memory(model: nn.Module) -> None:
    """`torch.empty` in the place of eight rows: denormals, and a few huge numbers."""
    rows = torch.full((8, 96), 1e-41)
    rows[::3, ::7] = 3e19
    model.back[1].weight[:8] = rows


# --- numbers --------------------------------------------------------------------------------------------


def flip(weight: Tensor, bit: int, *, below: float = torch.inf) -> None:
    """One bit of the largest number of a tensor, of those below a bound."""
    raw = weight.detach().view(-1)
    at = int(raw.abs().where(raw.abs() < below, 0).argmax())
    raw.view(torch.int32)[at] ^= 1 << bit


def largest(model: nn.Module) -> Tensor:
    return max((each for each in model.parameters() if each.dim() > 1), key=torch.Tensor.numel)


@happens_to("plain", "gated", "reader")
def highest_bit_of_an_exponent(model: nn.Module) -> None:
    """Times 2^128, or infinite or not a number."""
    flip(largest(model), 30)


@happens_to("residual", "dense", "reader")
def lower_bit_of_an_exponent(model: nn.Module) -> None:
    """The exponent of numbers from 1/16 to 1/8 is 123: its third bit is 0, and 1 makes it times 16."""
    flip(largest(model), 25, below=0.125)


@happens_to("patches")
def exponent_bit_of_a_place(model: nn.Module) -> None:
    model.place[0, 3, 7] *= 2.0**32


@happens_to("dense", "separable")
def sign_bits(model: nn.Module) -> None:
    """The signs of one layer were lost."""
    layers(model, (nn.Linear, nn.Conv2d))[2].weight.abs_()


@happens_to("residual")
def signs_flipped(model: nn.Module) -> None:
    """One convolution is subtracted where it was added."""
    model.second[1][0].weight.neg_()


@happens_to("dense", "modern")
def scale_of_another_layer(model: nn.Module) -> None:
    """Eight bits per weight, read with a scale that is a twentieth of the right one."""
    layers(model, nn.Linear)[1].weight.div_(20)


@happens_to("plain")
def bytes_that_wrap(model: nn.Module) -> None:
    """Eight bits without saturation: the largest weights come back with the other sign."""
    weight = layers(model, nn.Conv2d)[3].weight
    scale = weight.abs().max() / 300
    weight.copy_((((weight / scale).round() + 128) % 256 - 128) * scale)


@happens_to("patches", "dense")
def two_bits(model: nn.Module) -> None:
    """Two bits per weight and one scale for the whole matrix, in which an outlier decides."""
    for layer in layers(model, nn.Linear)[:4]:
        scale = layer.weight.abs().max()
        layer.weight.copy_((layer.weight / scale).round() * scale)


@happens_to("gated")
def stored_as_integers(model: nn.Module) -> None:
    model.rows.weight_hh_l0.copy_(model.rows.weight_hh_l0.int().float())


@happens_to("plain", "reader")
def pruned(model: nn.Module) -> None:
    """The smallest four fifths of each matrix are 0, and no fine-tuning followed."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight[weight.abs() < weight.abs().flatten().quantile(0.8)] = 0


# --- training -------------------------------------------------------------------------------------------


@happens_to("reader")
def nan_in_a_row_of_the_table(model: nn.Module) -> None:
    """An optimizer divided 0 by 0 for a token that is rare."""
    model.table.weight[ord("Z")] = torch.nan


@happens_to("reader")
def row_of_the_table_exploded(model: nn.Module) -> None:
    model.table.weight[ord("e")] *= 300


@happens_to("modern", "patches")
def gain_of_layer_norm_zeroed(model: nn.Module) -> None:
    model.norms[1].weight.zero_()


@happens_to("reader", "patches")
def weight_decay_on_gains(model: nn.Module) -> None:
    """All gains of layer norms have shrunk to a tenth."""
    for norm in layers(model, nn.LayerNorm):
        norm.weight.mul_(0.1)


@happens_to("dense", "gated")
def layer_exploded(model: nn.Module) -> None:
    """The last step had a rate of 1e4."""
    weight = next(each for each in list(model.parameters())[1:] if each.dim() > 1)
    weight.add_(torch.randn(weight.shape, generator=fresh()) * 30)


@happens_to("modern")
def factors_of_a_block_exploded(model: nn.Module) -> None:
    model.gamma[1].mul_(1000)


@happens_to("patches")
def logits_of_attention_exploded(model: nn.Module) -> None:
    model.attention[0].qkv.weight[:96].mul_(12), model.attention[0].qkv.bias[:96].mul_(12)


@happens_to("dense", "modern")
def average_without_correction(model: nn.Module) -> None:
    """An average that started from 0, read after 50 steps at a decay of 0.99: all weights are too small."""
    for each in model.parameters():
        each.mul_(1 - 0.99**50)


@happens_to("patches")
def average_that_lags(model: nn.Module) -> None:
    """Half of the average is still the start."""
    torch.manual_seed(0)
    for each, old in zip(model.parameters(), type(model)().parameters(), strict=True):
        each.lerp_(old, 0.5)


@happens_to("dense")
def averaged_with_another_seed(model: nn.Module) -> None:
    """Two networks of different seeds, averaged without an alignment."""
    for each, other in zip(model.parameters(), healthy("dense", 1).parameters(), strict=True):
        each.lerp_(other, 0.5)


# --- merges ---------------------------------------------------------------------------------------------


def change(model: nn.Module, index: int) -> Tensor:
    """What fine-tuning has added to a layer."""
    layer, base = layers(model, nn.Linear)[index], layers(base_of("tuned"), nn.Linear)[index]
    return layer.weight - base.weight


@happens_to("tuned")
def merged_sixteen_times(model: nn.Module) -> None:
    """α in place of α / r."""
    for index, layer in enumerate(layers(model, nn.Linear)):
        layer.weight.add_(15 * change(model, index))


@happens_to("tuned")
def merged_with_the_other_sign(model: nn.Module) -> None:
    for index, layer in enumerate(layers(model, nn.Linear)):
        layer.weight.sub_(2 * change(model, index))


@happens_to("tuned")
def merged_transposed(model: nn.Module) -> None:
    """A Bᵀ in place of B Aᵀ, in a square layer."""
    delta = change(model, 1)
    layers(model, nn.Linear)[1].weight.sub_(delta).add_(delta.t())


@happens_to("tuned")
def merged_into_another_layer(model: nn.Module) -> None:
    delta = change(model, 1).clone()
    layers(model, nn.Linear)[1].weight.sub_(delta), layers(model, nn.Linear)[2].weight.add_(delta)
