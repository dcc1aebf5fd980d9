"""`qk_norm`: a factory with which `swap_` normalises the queries and keys of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gonio.editing.twin import twin_of
from gonio.editing.where import Site, refuse_shards, sites_at, unwrapped
from gonio.errors import AlreadyAppliedError, NoMatchError, NotApplicableError, with_article
from gonio.nn import QKNormLinear
from gonio.nn.conversion import share_
from gonio.nn.qk_norm import check_eps
from gonio.seeding import generator
from gonio.surgery.anatomy import anatomy
from gonio.surgery.blocks import Attention
from gonio.surgery.equivalent import generated_example
from gonio.surgery.facts import computes_plainly
from gonio.surgery.recording import Part, record

_Heads = dict[str, set[tuple[int, int]]]  # "query" and "key": the rows of each head
_EQUAL = 1e-4  # relative; of lengths, where the dtype has the digits
_NOTHING = 1e-30  # a normal number in float32, in which squares are summed
_OTHERS = "it computes no queries or keys of the model that qk_norm was given"


@dataclass(frozen=True, eq=False, repr=False)
class QKNorm:
    """What :func:`qk_norm` returns: `f(layer) -> QKNormLinear` for one model's layers of queries and keys.

    Attributes:
        stays: by the path of an attention, why it is left as it is.

    Example:
        >>> model = gonio.models.byte_transformer(width=8)
        >>> factory = gonio.surgery.qk_norm(model)
        >>> factory, factory.can_act(model.head)
        (<QKNorm of 2 layers>, 'it computes no queries or keys of the model that qk_norm was given')
    """

    stays: Mapping[str, str]
    _rows: Mapping[nn.Module, _Heads]
    _eps: float

    takes: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    def can_act(self, layer: nn.Module) -> str | None:
        """Why the factory does not take a layer; None if it does."""
        if layer not in self._rows:
            return _OTHERS
        return (
            None if computes_plainly(layer) else "since qk_norm, it has got a forward or a parametrization of its own"
        )

    def __call__(self, layer: nn.Linear) -> QKNormLinear:
        """The layer with the same Parameter objects, whose gains are trained if its weight is."""
        why = self.can_act(layer)
        if why is not None:
            do = "Pass a layer with queries or keys, or use gonio.nn.QKNormLinear."
            raise NotApplicableError("qk_norm", type(layer).__name__, why, do)
        return _made(layer, self._rows[layer], self._eps)

    def __repr__(self) -> str:
        return f"<QKNorm of {len(self._rows)} layer{'s' * (len(self._rows) != 1)}>"


def qk_norm(model: nn.Module, *, example: Any = None, eps: float = 1e-6) -> QKNorm:
    r"""A factory for :func:`gonio.swap_` that RMS-normalises queries and keys, head by head, after their layers.

    ``gonio.swap_(model, gonio.surgery.qk_norm(model))`` puts a :class:`gonio.nn.QKNormLinear` with the same weight and
    bias in the place of each layer that computes queries or keys, of which one gain is new for each kind. Logits
    :math:`⟨q, k⟩/√d` of a head are then at most :math:`√d\,\max_i|g^q_i|\max_i|g^k_i|`, which starts at :math:`√d`,
    whatever the weights are. The function of the model changes: train it from there.

    :func:`gonio.surgery.anatomy` finds the rows of heads. Then a twin of the model runs with random weights in
    the new layers: a block is taken only if all of its queries have one length, and all of its keys, so that nothing
    but rotary positions and constants is between the norm and the product. The model itself is not changed.

    Args:
        example: an input, as :func:`gonio.surgery.anatomy` takes it; None for a generated one.
        eps: ε of the norms.

    Returns: the factory. Layers that compute no queries or keys are left alone, and the notes of `swap_` name the
        attention that stays.

    Raises:
        NoMatchError: if no attention can be normalised, with the reasons: queries or keys that pass a norm; a part of
            the keys that all heads share; heads from several layers, or from rows that are not adjacent; a weight that
            is not that of a plain Linear, as in torch's `nn.MultiheadAttention`, which reads its weight itself, and
            in the `Conv1D` of transformers; a weight that other layers have too; queries and keys that are computed
            further, by an activation or a sum with positions.
        AlreadyAppliedError: if the queries and keys come from layers of the new kind.
        NotApplicableError: for a sharded model; by the factory, for a layer that it does not take.
        InvalidArgumentError: as :func:`gonio.surgery.anatomy` and :class:`gonio.nn.QKNormLinear`.

    Example:
        >>> model = gonio.models.byte_transformer(width=8)
        >>> print(gonio.swap_(model, gonio.surgery.qk_norm(model)))
        swap_: 2 modules
          blocks.0.qkv  Linear → QKNormLinear
          blocks.1.qkv  Linear → QKNormLinear
          note: 4 new parameters: build the optimizer after this edit, or pass optimizer=
        >>> gonio.surgery.anatomy(model).attention[0].normed
        True

    References: A. Yang et al., "Qwen3 technical report", 2025. https://arxiv.org/abs/2505.09388; further ones at
        :class:`gonio.nn.QKNormLinear`.
    """
    check_eps(eps)
    refuse_shards(model, "qk_norm")
    inner = unwrapped(model)
    given = generated_example(inner) if example is None else example
    found = anatomy(inner, example=given)
    at = sites_at(inner)
    stays = dict(found.unknown) | _refused(found.attention, at)
    _spread_(stays, found.attention)
    able = [block for block in found.attention if block.path not in stays]
    if able:
        stays |= _unequal(inner, given, able, _layers(able))
        _spread_(stays, found.attention)
        able = [block for block in able if block.path not in stays]
    if not able:
        for path in _layers(found.attention):
            if path in at and isinstance(at[path].module, QKNormLinear):
                raise AlreadyAppliedError("qk_norm", path, "a QKNormLinear")
        raise NoMatchError("qk_norm", None, [], refused=stays)
    rows = {at[path].module: heads for path, heads in _layers(able).items()}
    return QKNorm(stays, rows, eps)


# --- which blocks -----------------------------------------------------------------------------------------------------


def _parts(block: Attention) -> Iterator[Part]:
    yield from (part for head in (*block.query, *block.key, block.shared_key) for part in head)


def _layers(blocks: Sequence[Attention]) -> dict[str, _Heads]:
    """By the path of a layer, the rows of each head of queries and of keys."""
    found: dict[str, _Heads] = {}
    for block in blocks:
        for role, heads in (("query", block.query), ("key", block.key)):
            for part in (part for head in heads for part in head):
                layer = found.setdefault(part.tensor.rpartition(".")[0], {"query": set(), "key": set()})
                layer[role].update(part.rows)
    return found


def _refused(blocks: Sequence[Attention], at: Mapping[str, Site]) -> dict[str, str]:
    """By the path of a block, why its queries and keys cannot be normalised, as far as its parts tell."""
    of_row: dict[tuple[str, int], Any] = {}  # by tensor and row, the role, the rows of the head
    sizes: dict[tuple[str, str], int] = {}  # by tensor and role
    mixed: set[str] = set()
    for block in blocks:
        for role in ("query", "key", "value"):
            for part in (part for head in getattr(block, role) for part in head):
                own = (role, () if role == "value" else part.rows)
                same = role == "value" or sizes.setdefault((part.tensor, role), part.count) == part.count
                if not (same and all(of_row.setdefault((part.tensor, row), own) == own for row in part.indices)):
                    mixed.add(part.tensor)
    found = {}
    for block in blocks:
        why = _why_not(block, at)
        if why is None and (again := next((part.tensor for part in _parts(block) if part.tensor in mixed), None)):
            why = f"rows of {again} compute several of queries, keys and values, or heads of several sizes"
        if why is not None:
            found[block.path] = why
    return found


def _why_not(block: Attention, at: Mapping[str, Site]) -> str | None:
    if block.normed:
        return "a norm follows its queries or keys already"
    if block.shared_key:
        return "its heads share a part of the keys"
    for head in (*block.query, *block.key):
        if len(head) != 1:
            return "several layers compute the queries or keys of a head"
        (part,) = head
        path, _, name = part.tensor.rpartition(".")
        layer = at[path].module if path in at else None
        if layer is None:
            return f"{part.tensor} is not found by its name, as inside a wrapper"
        if not isinstance(layer, nn.Linear) or name != "weight":
            return f"{part.tensor} is a tensor of {with_article(type(layer).__name__)}, not the weight of a Linear"
        if not computes_plainly(layer):
            return f"{path} is a subclass of Linear with a forward of its own, which may compute something else"
        if len(part.rows) != 1 or part.dim != 0:
            return f"the rows of a head are not adjacent in {part.tensor}"
        if any(
            site.module._parameters.get("weight") is layer.weight for site in at.values() if site.module is not layer
        ):
            return f"another layer has the weight {part.tensor} too"
    sizes = {part.count for part in _parts(block)}
    return "its heads have different sizes" if len(sizes) > 1 else None


def _spread_(stays: dict[str, str], blocks: Sequence[Attention]) -> None:
    """A block that has a layer in common with one that stays, stays."""
    of = {block.path: {part.tensor for part in _parts(block)} for block in blocks}
    while True:
        held = {tensor: path for path in of if path in stays for tensor in of[path]}
        more = {path: tensor for path, own in of.items() if path not in stays for tensor in own if tensor in held}
        if not more:
            return
        stays.update({path: f"{held[tensor]}, which stays, has the same {tensor}" for path, tensor in more.items()})


# --- what a norm there does -------------------------------------------------------------------------------------------


@torch.inference_mode(False)
def _unequal(
    model: nn.Module, example: Any, blocks: Sequence[Attention], layers: Mapping[str, _Heads]
) -> dict[str, str]:
    """The blocks whose queries or keys still differ in length if the rows of every head are normalised."""
    twin, coarsest = twin_of(model), _EQUAL
    known = sites_at(twin)
    for path, heads in layers.items():
        layer = known[path].module
        new = _with_random_weights(layer, heads)
        coarsest = max(coarsest, 4 * torch.finfo(new.weight.dtype).eps)
        for parent, name in known[path].owners:
            parent._modules[name] = new
    run = record(twin, example)
    equal: dict[str, bool] = {}
    for product in run.products:
        if product.value is not None:
            same = _same_length(product.query, coarsest) and _same_length(product.key, coarsest)
            equal[product.path] = equal.get(product.path, True) and same
    why = "its queries or keys are not what its layers compute, so that a norm there does not set their length"
    return {block.path: why for block in blocks if not equal.get(block.path, False)}


def _with_random_weights(layer: Any, heads: _Heads) -> QKNormLinear:
    """The layer with a norm, and with a bias and weights of which no head is 0, beside which ε is nothing."""
    new, random = _made(layer, heads, _NOTHING), generator(0, "qk_norm")
    for name, scale in (("weight", layer.in_features**-0.5), ("bias", 1.0)):
        shape = layer.weight.shape if name == "weight" else layer.weight.shape[:1]
        new._parameters[name] = nn.Parameter(
            (scale * torch.randn(shape, generator=random, device="cpu", dtype=torch.float32)).to(layer.weight)
        )
    return new


def _same_length(vectors: Tensor, relative: float) -> bool:
    lengths = vectors.detach().double().norm(dim=-1)
    return bool(lengths.numel() and lengths.min() > 0 and lengths.max() - lengths.min() <= relative * lengths.max())


def _made(layer: nn.Linear, heads: _Heads, eps: float) -> QKNormLinear:
    sides = {role: sorted(rows) for role, rows in heads.items()}
    sizes = layer.in_features, layer.out_features, layer.bias is not None
    new = share_(QKNormLinear(*sizes, query=sides["query"], key=sides["key"], eps=eps, device="meta"), layer)
    for name, gain in list(new._parameters.items()):
        if name.endswith("_gain") and gain is not None:
            ones = torch.ones(gain.shape, device=layer.weight.device, dtype=layer.weight.dtype)
            new._parameters[name] = nn.Parameter(ones, requires_grad=layer.weight.requires_grad)
    return new
