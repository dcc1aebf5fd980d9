"""What a layer does: stated for its type, or measured by running it.

A fact of a type holds for an object if the type's own forward runs: a subclass with another forward may compute
anything. Types of torch, timm and transformers are listed here, layers of gonio declare `layer_facts` on their class,
and :func:`register` adds a type of the user. What is neither stated nor measured is unknown, and verbs leave it alone.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd, inf, prod, sqrt
from operator import attrgetter
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from gonio.editing.memory import memory_key
from gonio.editing.twin import copy_of
from gonio.editing.where import require_model
from gonio.errors import InvalidArgumentError
from gonio.geometry.certified import nonnegative_norm
from gonio.nn.conversion import computes_as
from gonio.seeding import generator, state_kept

Hook = TypeVar("Hook", bound=Callable[..., Any])

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHTED = (nn.Linear, nn.Bilinear, *CONVOLUTIONS)
TABLES = (nn.Embedding, nn.EmbeddingBag)
TORCH_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


@dataclass(frozen=True)
class Facts:
    """What is known of a layer's function. None stands for "not known".

    Attributes:
        removes_scale: whether the output in training is the same for x and c·x, c > 0, as after a normalisation.
        removes_shift: whether also a constant that is added to a channel (dim 1) has no effect.
        homogeneous: whether f(c·x) = c·f(x) for c > 0.
        acts_on: what the layer treats separately: "entries" (elementwise) or "channels" (dim 1, as pooling does).
        linear: whether it is linear and has no weights (pooling by averages, dropout, reshaping).
        activation: the name of the activation function, as :func:`gonio.init.gain` takes it.
        why_not_affine: for a norm with running statistics: why it does not scale and shift each channel (dim 1) by
            them in evaluation mode; gives None where it does. None for other layers.
        tail: names of the children that are applied, in order, to the result of what the other facts describe.
        joins: gives whether a norm takes its statistics over the batches of all processes.
        mixture: gives the shares of the statistics of a norm that mixes several.
        fused: child layers (or own tensors) that compute several of queries, keys and values at once, and how many; 0
            for as many as the layer has times more outputs than inputs.
        attends: for a module without weights that computes softmax(QKᵀ/√size)·V by a kernel of its own: gives its
            queries, keys and values, each (…, tokens, size), of its arguments.
        returns: brings the result of such a module, (…, tokens, size), into the layout in which it returns it.
        lipschitz: a Lipschitz constant in l2 in evaluation mode, or a function that gives it for the layer and an input
            of the shape for which it holds.
    """

    removes_scale: bool | None = None
    removes_shift: bool | None = None
    homogeneous: bool | None = None
    acts_on: Literal["entries", "channels"] | None = None
    linear: bool | None = None
    activation: str = ""
    why_not_affine: Callable[[Any], str | None] | None = None
    tail: tuple[str, ...] = ()
    joins: Callable[[Any], bool] | None = None
    mixture: Callable[[Any], dict[str, dict[str, float]]] | None = None
    fused: Mapping[str, int] = field(default_factory=dict)
    attends: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    returns: Callable[[Tensor], Tensor] | None = None
    lipschitz: float | Callable[[Any, Tensor], float] | None = None

    def __post_init__(self) -> None:
        for name in ("removes_scale", "removes_shift", "homogeneous", "linear"):
            if not isinstance(value := getattr(self, name), (bool, type(None))):
                do = "Leave it out where it is not known."
                raise InvalidArgumentError(f"{name} of a layer is True, False or None", repr(value), do)
        if self.acts_on not in (None, "entries", "channels"):
            do = "Leave it out for a layer that mixes channels."
            raise InvalidArgumentError('acts_on is "entries" or "channels"', repr(self.acts_on), do)


UNKNOWN = Facts()


def register(kind: type[nn.Module], facts: Facts) -> None:
    """State what the layers of a type of your own do; a later call replaces the facts of an earlier one.

    Raises:
        InvalidArgumentError: if `kind` is not a module class with a forward of its own, or `facts` no :class:`Facts`.

    Example:
        >>> class Scaled(nn.Module):
        ...     def forward(self, x):
        ...         return x / x.norm(dim=-1, keepdim=True)
        >>> gonio.surgery.facts.register(Scaled, gonio.surgery.facts.Facts(removes_scale=True))
        >>> gonio.surgery.followed_by_norm(nn.Sequential(nn.Linear(2, 2), Scaled()))
        {'0': '1'}
    """
    given: object = kind
    if not (isinstance(given, type) and issubclass(given, nn.Module)) or given is nn.Module:
        raise InvalidArgumentError("register() takes a module class", repr(kind), "Pass the class of your layer.")
    stated: object = facts
    if not isinstance(stated, Facts):
        do = "Pass e.g. Facts(removes_scale=True)."
        raise InvalidArgumentError("register() takes gonio.surgery.facts.Facts", repr(facts), do)
    _STATED[kind] = facts


def facts_of(module: nn.Module) -> Facts:
    """The facts that are stated for the type of a layer; :data:`UNKNOWN` if there are none.

    Example:
        >>> from gonio.surgery.facts import facts_of
        >>> facts_of(nn.BatchNorm2d(3)).removes_scale, facts_of(nn.ReLU()).homogeneous, facts_of(nn.GELU()).homogeneous
        (True, True, None)
    """
    for kind in type(module).__mro__:
        stated = _STATED.get(kind) or _declared(kind) or _foreign(kind)
        if stated is not None:
            return stated if computes_as(module, (kind,)) else UNKNOWN
    return UNKNOWN


def _declared(kind: type) -> Facts | None:
    declared = vars(kind).get("layer_facts")
    return Facts(**declared) if isinstance(declared, Mapping) and kind.__module__.startswith("gonio.") else None


def _foreign(kind: type) -> Facts | None:
    """The facts of a type of timm or transformers: of the very object that its module has under its name."""
    stated = _FOREIGN.get(f"{kind.__module__}.{kind.__qualname__}")
    there = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None)
    return stated if stated is not None and there is kind else None


# --- hooks --------------------------------------------------------------------------------------------

_READING: set[Any] = set()


def only_reads(hook: Hook) -> Hook:
    """Register a method as a forward hook that changes neither inputs nor outputs; a decorator."""
    _READING.add(hook)
    return hook


def may_change(hook: Any) -> bool:
    """Whether a forward hook is none that was registered to read only. What runs is told by identity, not by name."""
    return getattr(hook, "__func__", type(hook).__call__) not in _READING


def has_changing_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks that may change its inputs or its output.

    Example:
        >>> from gonio.surgery.facts import has_changing_hooks
        >>> layer = nn.Linear(2, 2)
        >>> _ = layer.register_forward_hook(lambda module, inputs, output: 2 * output)
        >>> has_changing_hooks(layer)
        True
    """
    return any(map(may_change, (*module._forward_hooks.values(), *module._forward_pre_hooks.values())))


# --- which forward runs -------------------------------------------------------------------------------


def computes_plainly(module: nn.Module) -> bool:
    """Whether the module applies its own Parameter `weight`, and a bias, as torch's layer of its kind does."""
    own = module._parameters.get("weight")
    return own is not None and own is getattr(module, "weight", None) and computes_as(module, WEIGHTED)


def applied_weight(module: nn.Module | None) -> Tensor | None:
    """The weight with which a module computes as torch's linear layer or convolution of its class, in evaluation mode.

    What timm's layers with a forward of their own apply is stated by type; the padding of a convolution among them may
    be other zeros than its `padding` says. None for everything else.

    Example:
        >>> from gonio.surgery.facts import applied_weight
        >>> layer = nn.Linear(2, 2)
        >>> applied_weight(layer) is layer.weight, applied_weight(nn.ReLU())
        (True, None)
    """
    if module is None or isinstance(module, nn.Bilinear):
        return None
    if computes_as(module, WEIGHTED):
        return getattr(module, "weight", None)
    kind = type(module)
    own = "forward" in vars(module) or getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is not kind
    applied = None if own else _APPLIED.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if applied is None else applied(module)


def tail_of(norm: nn.Module) -> list[nn.Module]:
    """The dropout and activation that a norm applies to its result; empty for most."""
    return [part for name in facts_of(norm).tail if (part := norm._modules.get(name)) is not None]


def without_tail(norm: nn.Module) -> nn.Module:
    """A norm of torch's own class on the same Parameters and buffers; the norm itself if it has no tail."""
    if not facts_of(norm).tail:
        return norm
    plain = copy.copy(norm)
    plain.__class__ = next(kind for kind in _BATCH_NORMS if isinstance(norm, kind))
    for name in ("_parameters", "_buffers"):
        plain.__dict__[name] = norm.__dict__[name].copy()
    plain.__dict__["_modules"] = {}
    return plain


# --- measured -----------------------------------------------------------------------------------------


def measure(module: nn.Module, shapes: Iterable[Sequence[int]]) -> Facts:
    """Whether a layer of unknown type removes the scale or a shift of its input, or passes it on, by running it.

    A copy with random parameters, in float64 and training mode, runs on x, 2x, 2x + a constant per channel and another
    input, of the first shape that it takes, and does so with x of three sizes: a layer that saturates or clips removes
    the scale of large inputs alone. Nothing is known of a layer that changes the shape or takes none of them.

    Raises:
        InvalidArgumentError: if `module` is no module, or a shape has fewer than two dimensions.

    Example:
        >>> from gonio.surgery.facts import measure
        >>> class Centred(nn.Module):
        ...     def forward(self, x):
        ...         return x - x.mean(-1, keepdim=True)
        >>> found = measure(Centred(), [(4, 8)])
        >>> found.removes_scale, found.homogeneous
        (False, True)
    """
    require_model(module, "measure()")
    random = generator(0, "facts")
    try:
        on_meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        twin = copy_of(module).to_empty(device="cpu") if on_meta else copy_of(module).cpu()
    except Exception:  # the layer's own code can raise anything
        return UNKNOWN
    twin = twin.double().train()
    for parameter in twin.parameters():
        if parameter.is_floating_point():
            parameter.data.uniform_(0.5, 1.5, generator=random)
    for shape in shapes:
        if len(shape) < 2:
            do = "Give a batch of at least one example, such as (8, 16)."
            raise InvalidArgumentError("measure() takes shapes of a batch and its channels", str(tuple(shape)), do)
        x, other = (torch.randn(*shape, generator=random, dtype=torch.float64, device="cpu") for _ in range(2))
        shift = 10 * torch.rand(
            1, shape[1], *[1] * (len(shape) - 2), generator=random, dtype=torch.float64, device="cpu"
        )
        given = (x, 2 * x, x + shift, other)
        try:
            with state_kept(), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the layer, about an input that only this makes
                runs = [[twin.forward(size * each) for each in given] for size in _SIZES]
        except Exception:
            continue
        firsts = [first for first, *_ in runs]
        if not all(isinstance(y, Tensor) and y.shape == x.shape and y.is_floating_point() for y in firsts):
            continue
        if any(_alike(first, apart) for first, _, _, apart in runs):  # a constant tells nothing
            return UNKNOWN
        scale = all(_alike(run[0], run[1], within) for run, within in zip(runs, _SIZES.values(), strict=True))
        shifts = all(_alike(first, shifted) for first, _, shifted, _ in runs)
        return Facts(scale, scale and shifts, all(_alike(2 * first, doubled) for first, doubled, *_ in runs))
    return UNKNOWN


# Of the inputs of a measurement, with the share by which outputs for x and 2x may differ where the scale is removed: a
# normalisation with an eps of 1e-3, the largest in use, differs by 0.0005 and 0.1 at sizes of 1 and 0.05.
_SIZES = {100.0: 1e-4, 1.0: 1e-3, 0.05: 0.25}


def _alike(a: Tensor, b: Tensor, within: float = 1e-4) -> bool:
    return bool(torch.isfinite(a).all()) and float((a - b).abs().max()) <= within * float(a.abs().max())


def padding_rows(model: nn.Module) -> dict[Hashable, frozenset[int]]:
    """By the memory of each weight, the rows that stand for padding in an embedding that has or shares it.

    Example:
        >>> from gonio.surgery.facts import padding_rows
        >>> table, head = nn.Embedding(5, 3, padding_idx=1), nn.Linear(3, 5, bias=False)
        >>> head.weight = table.weight
        >>> list(padding_rows(nn.Sequential(head, table)).values())
        [frozenset({1})]
    """
    found: dict[Hashable, frozenset[int]] = {}
    for module in model.modules():
        row = getattr(module, "padding_idx", None)
        if isinstance(row, int) and (weight := module._parameters.get("weight")) is not None:
            found[memory_key(weight)] = found.get(memory_key(weight), frozenset()) | {row}
    return found


# --- torch, timm and transformers ---------------------------------------------------------------------

_BATCH_NORMS = (nn.SyncBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _without_statistics(norm: nn.Module) -> str | None:
    stored = isinstance(norm._buffers.get("running_mean"), Tensor)
    return None if stored else "it keeps no running statistics"


_BATCH = Facts(removes_scale=True, removes_shift=True, why_not_affine=_without_statistics)
_INSTANCE = Facts(removes_scale=True, removes_shift=True)
_ACROSS = Facts(removes_scale=True, removes_shift=False)
_PASS = Facts(homogeneous=True, linear=True, lipschitz=nonnegative_norm)
_EACH_ENTRY = replace(_PASS, acts_on="entries")
_EACH_CHANNEL = Facts(homogeneous=True, acts_on="channels")
_COPIES = Facts(homogeneous=True, lipschitz=nonnegative_norm)
_SHRINKS = Facts(lipschitz=1.0)


def _of_pools() -> dict[type[nn.Module], Facts]:
    means = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
    found = dict.fromkeys(means, replace(_EACH_CHANNEL, linear=True, lipschitz=nonnegative_norm))
    largest = {
        _of_max_pool: (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        _of_adaptive_max_pool: (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    }
    for bound, pools in largest.items():
        for dims, pool in enumerate(pools, start=1):
            found[pool] = replace(_EACH_CHANNEL, linear=False, lipschitz=partial(bound, dims=dims))
    return found


def _of_max_pool(pool: Any, x: Tensor, *, dims: int) -> float:
    """√(the largest number of windows with one entry), as every output is one entry."""
    kernel, stride, dilation = (_each(size, dims) for size in (pool.kernel_size, pool.stride, pool.dilation))
    return sqrt(prod(-(-k * gcd(s, d) // s) for k, s, d in zip(kernel, stride, dilation, strict=True)))


def _of_adaptive_max_pool(pool: Any, x: Tensor, *, dims: int) -> float:
    sizes = zip(x.shape[-dims:], _each(pool.output_size, dims), strict=True)
    return sqrt(prod(1 if out is None or n % out == 0 else -(-out // n) + 1 for n, out in sizes))


def _each(size: Any, dims: int) -> tuple[Any, ...]:
    return tuple(size) if isinstance(size, (tuple, list)) else (size,) * dims


# The largest slope of each activation, rounded up; "gelu" covers the form with tanh.
SLOPES = {
    **dict.fromkeys(("relu", "relu6", "tanh", "abs", "neg", "sin", "cos", "softsign", "logsigmoid"), 1.0),
    "sigmoid": 0.25,
    "hardsigmoid": 0.16667,
    "hardswish": 1.5,
    "gelu": 1.129,
    "silu": 1.09984,
    "mish": 1.0885,
    "selu": 1.7581,
}
_STATED: dict[type[nn.Module], Facts] = {
    **dict.fromkeys(_BATCH_NORMS, _BATCH),
    **dict.fromkeys(_INSTANCE_NORMS, _INSTANCE),
    **dict.fromkeys((nn.GroupNorm, nn.LayerNorm, nn.RMSNorm), _ACROSS),
    **dict.fromkeys((nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), _EACH_ENTRY),
    **dict.fromkeys((nn.Flatten, nn.Unflatten), _PASS),
    **dict.fromkeys((nn.AlphaDropout, nn.FeatureAlphaDropout), Facts(linear=True, lipschitz=nonnegative_norm)),
    **dict.fromkeys((nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle), _COPIES),
    **dict.fromkeys((nn.Upsample, nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d, nn.CircularPad2d), _COPIES),
    **_of_pools(),
    nn.ReLU: Facts(homogeneous=True, acts_on="entries", activation="relu", lipschitz=1.0),
    nn.LeakyReLU: Facts(
        homogeneous=True,
        acts_on="entries",
        activation="leaky_relu",
        lipschitz=lambda act, x: max(1.0, abs(act.negative_slope)),
    ),
    nn.PReLU: Facts(
        homogeneous=True, acts_on="entries", lipschitz=lambda act, x: max(1.0, float(act.weight.abs().max()))
    ),
    nn.ReLU6: Facts(activation="relu", lipschitz=1.0),
    # it jumps at its threshold, by rounding if that is large
    nn.Softplus: Facts(activation="softplus", lipschitz=lambda act, x: 1.0 if act.threshold >= 15 else inf),
    nn.ELU: Facts(activation="elu", lipschitz=lambda act, x: max(1.0, abs(act.alpha))),
    **{
        getattr(nn, name): Facts(activation=name.lower(), lipschitz=SLOPES[name.lower()])
        for name in ("Tanh", "Sigmoid", "GELU", "SiLU", "Mish", "SELU", "Hardswish")
    },
    nn.CELU: Facts(lipschitz=lambda act, x: 1.0 if act.alpha > 0 else inf),  # below 0 its slope has no limit
    **dict.fromkeys((nn.Hardtanh, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink), _SHRINKS),
    nn.Hardsigmoid: Facts(lipschitz=SLOPES["hardsigmoid"]),
    nn.Softmax: Facts(lipschitz=0.5),
    nn.LogSoftmax: Facts(lipschitz=lambda act, x: sqrt(x.shape[1 if act.dim is None else act.dim])),
    nn.MultiheadAttention: Facts(fused={"in_proj_weight": 3}),
}
ACTIVATIONS = frozenset(facts.activation for facts in _STATED.values() if facts.activation)

_WITH_ACTIVATION = replace(_BATCH, tail=("drop", "act"))
# Attention whose heads are consecutive rows of one layer: the layer, how many parts it has, and the types.
_FUSED = {
    ("qkv", 3): """
        timm.layers: attention.Attention attention.AttentionRope attention2d.Attention2d
            attention_pool2d.AttentionPool2d attention_pool2d.RotAttentionPool2d
        timm.models: beit.Attention cait.TalkingHeadAttn coat.FactorAttnConvRelPosEnc convit.MHSA davit.ChannelAttention
            davit.WindowAttention edgenext.CrossCovarianceAttn efficientformer.Attention eva.EvaAttention
            fastvit.Attention hiera.MaskUnitAttention hieradet_sam2.MultiScaleAttention levit.Attention
            maxxvit.Attention2d maxxvit.AttentionCl metaformer.Attention mvitv2.MultiScaleAttention nest.Attention
            swin_transformer.WindowAttention swin_transformer_v2.WindowAttention
            swin_transformer_v2_cr.WindowMultiHeadAttention tiny_vit.Attention twins.LocallyGroupedAttn
            visformer.Attention vision_transformer_relpos.RelPosAttention vision_transformer_sam.Attention
            volo.Attention xcit.XCA
        transformers.models: blip.BlipAttention blip_2.Blip2Attention glm4v.Glm4vVisionAttention
            got_ocr2.GotOcr2VisionAttention hiera.HieraMaskUnitAttention instructblip.InstructBlipAttention
            instructblipvideo.InstructBlipVideoAttention mgp_str.MgpstrAttention qwen2_vl.VisionAttention
            qwen2_5_vl.Qwen2_5_VLVisionAttention qwen3_vl.Qwen3VLVisionAttention sam.SamVisionAttention
            sam2.Sam2MultiScaleAttention sam_hq.SamHQVisionAttention seggpt.SegGptAttention
            timesformer.TimesformerSelfAttention vitdet.VitDetAttention""",
    ("qkv", 0): "timm.models: gcvit.WindowAttentionGlobal",
    ("qk", 2): "timm.models: convit.GPSA tnt.Attention",
    ("kv", 2): """
        timm.layers: attention_pool.AttentionPoolLatent
        timm.models: levit.AttentionDownsample pvt_v2.Attention twins.GlobalSubSampleAttn volo.ClassAttention""",
    ("qkv_proj", 3): """
        transformers.models: codegen.CodeGenAttention minimax.MiniMaxLightningAttention phi3.Phi3Attention
            phi4_multimodal.Phi4MultimodalAttention""",
    ("c_attn", 0): """
        transformers.models: decision_transformer.DecisionTransformerGPT2Attention gpt2.GPT2Attention
            imagegpt.ImageGPTAttention openai.Attention""",
    ("query_key_value", 3): """
        transformers.models: bloom.BloomAttention falcon.FalconAttention gpt_neox.GPTNeoXAttention
            gpt_neox_japanese.GPTNeoXJapaneseAttention persimmon.PersimmonAttention""",
    ("Wqkv", 3): "transformers.models: dbrx.DbrxAttention modernbert.ModernBertAttention mpt.MptAttention",
    ("in_proj", 3): "transformers.models: deberta.DisentangledSelfAttention",
}


def _attentions() -> dict[str, Facts]:
    """The facts of the types in the table, by full name. A module of transformers is `NAME.modeling_NAME`."""
    found = {}
    for (layer, parts), text in _FUSED.items():
        package = ""
        for word in text.split():
            if word.endswith(":"):
                package = word[:-1]
                continue
            module, kind = word.split(".")
            module = f"{module}.modeling_{module}" if package.startswith("transformers") else module
            found[f"{package}.{module}.{kind}"] = Facts(fused={layer: parts})
    return found


_OF_TIMM = (
    *(("Swish", "silu"), ("Mish", "mish"), ("Sigmoid", "sigmoid"), ("Tanh", "tanh")),
    *(("HardSwish", "hardswish"), ("GELU", "gelu"), ("GELUTanh", "gelu")),
)


def _standardised(conv: Any) -> Tensor:
    """Filters of mean 0 and variance 1 but for eps, times a gain and a constant where the layer has them."""
    var, mean = torch.var_mean(conv.weight, tuple(range(1, conv.weight.dim())), correction=0, keepdim=True)
    filters: Tensor = (conv.weight - mean) / (var + conv.eps).sqrt()
    return filters * conv.gain * conv.scale if hasattr(conv, "gain") else filters


_APPLIED: dict[str, Callable[[Any], Tensor]] = {
    **dict.fromkeys(("timm.layers.linear.Linear", "timm.layers.conv2d_same.Conv2dSame"), attrgetter("weight")),
    **{f"timm.layers.std_conv.{s}StdConv2d{same}": _standardised for s in ("", "Scaled") for same in ("", "Same")},
}
_SCALED = Facts(
    removes_scale=False,
    removes_shift=False,
    homogeneous=True,
    lipschitz=lambda layer, x: float(layer.gamma.detach().abs().max()),
)
_GELU = ("GELUActivation", "NewGELUActivation", "GELUTanh", "FastGELUActivation")
_FOREIGN: dict[str, Facts] = _attentions() | {
    "timm.layers.norm_act.BatchNormAct2d": _WITH_ACTIVATION,
    "timm.layers.norm_act.SyncBatchNormAct": _WITH_ACTIVATION,
    **{f"timm.layers.activations.{kind}": Facts(activation=name, lipschitz=SLOPES[name]) for kind, name in _OF_TIMM},
    **{f"transformers.activations.{kind}": Facts(activation="gelu", lipschitz=SLOPES["gelu"]) for kind in _GELU},
    **{f"timm.layers.layer_scale.LayerScale{dims}": _SCALED for dims in ("", "2d")},
    "timm.layers.blur_pool.BlurPool2d": _COPIES,
    "transformers.activations.SiLUActivation": Facts(activation="silu", lipschitz=SLOPES["silu"]),
}
