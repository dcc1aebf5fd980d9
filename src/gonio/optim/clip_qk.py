"""`clip_qk_`: no attention logit grows beyond a limit while a model trains (QK-Clip)."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gonio.editing.copies import Copies
from gonio.editing.edit import Edit, Edited
from gonio.editing.steps import Sum, check_optimizer, differ, expect_steps_, sum_of, watch
from gonio.editing.twin import without_wrappers
from gonio.editing.where import (
    Where,
    as_selector,
    asked_of,
    holds_original,
    is_replicated,
    modules_at,
    refuse_shards,
    sites,
)
from gonio.editing.wrappers import parameter_ids, real_optimizers, with_inner
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NoMatchError, NotApplicableError, check_range
from gonio.execution import several_ranks
from gonio.geometry.views import why_not_dense
from gonio.messages import counted, say
from gonio.optim.holding import refuse_averages, step_of_hold
from gonio.surgery.anatomy import anatomy
from gonio.surgery.blocks import Anatomy, Attention
from gonio.surgery.observing import (
    ONE_SAMPLE,
    Observer,
    by_head,
    by_index,
    logits_of,
    observing,
    repeated,
    why_not_observed,
)
from gonio.surgery.recording import Part

_UNSEEN = 3  # steps without an observed logit, after which a clip says that it has no effect


@dataclass(frozen=True, eq=False, repr=False)
class Clipped(Edited):
    """The heads whose logits :func:`clip_qk_` limits. `str()` is a table; `undo_()` ends it, trained weights stay.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> clip = gonio.clip_qk_(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        >>> clip, clip.factors()
        (<Clipped by clip_qk_: 1 module>, {})
    """

    _clip: _Clip = field(repr=False)

    def largest(self) -> dict[str, Tensor]:
        """By the path of the attention, for each head the largest logit before the last step.

        For a block in which no logit can exceed the limit, because ‖q‖·‖k‖ is below it, the values are these bounds.
        """
        return {block.path: values.clone() for block, values in self._clip.last}

    def factors(self) -> dict[str, Tensor]:
        """By the path of the attention, what the last step multiplied each head's logits by; 1 for most."""
        return {block.path: _factors(values, self._clip.limit) for block, values in self._clip.last}


def clip_qk_(
    model: nn.Module, optimizer: Optimizer, *, limit: float = 100.0, where: Where = None, example: Any = None
) -> Clipped:
    r"""Scale queries and keys of a head down after each step before which one of its logits exceeded a limit.

    With S_h the largest logit :math:`⟨q, k⟩/√d` of head h in the training forwards since the last step, over all pairs
    that the mask allows, and :math:`γ_h = τ/S_h`:

    .. math::
        S_h > τ:\quad W_{q,h} ← \sqrt{γ_h}\,W_{q,h},\quad W_{k,h} ← \sqrt{γ_h}\,W_{k,h}

    with their biases. Where heads share keys, or a part of them, only the head's query is scaled, by γ_h, so that the
    function of the other heads stays. Heads below the limit are not changed. Logits are read where they are computed:
    they are those of the softmax, or products of the queries and keys of a fused kernel, which are computed only if
    max ‖q‖ · max ‖k‖ exceeds the limit. The optimizer's state stays as it is.

    Args:
        model: :func:`gonio.surgery.anatomy` must know its attention. Of several processes, pass the
            DistributedDataParallel: all of them use the largest logit of all.
        optimizer: of the weights of queries and keys.
        limit: the limit τ.
        where: which modules that multiply queries and keys; None for all that can be clipped.
        example: an input, as :func:`gonio.surgery.anatomy` takes it.

    Returns: :class:`Clipped`, whose `undo_()` ends the clip.

    Raises:
        NoMatchError: if `where` selects no attention that can be clipped, with the reasons: queries behind a norm,
            which have no scale; logits with a cap or with a bias of positions; weights that are held or are not in the
            optimizer; a module of several products.
        NotApplicableError: if `where` selects one that cannot be clipped; for sharded parameters; in one of the first
            steps, if no logit was observed, if several processes train a model that is not the one replicated, and if
            steps compute the weights from copies in float32, as optimizers for half precision do.
        AlreadyAppliedError: if a selected attention is clipped already.
        InvalidArgumentError: for a limit that is not positive, and as :func:`gonio.surgery.anatomy` and
            :func:`gonio.hold_`.

    Example:
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        >>> clip = gonio.clip_qk_(model, optimizer, limit=1e-3)
        >>> print(clip)
        clip_qk_: 1 module
          self_attn  logits of 2 heads of 4 limited to 0.001
        >>> model(torch.randn(3, 5, 8)).square().sum().backward()
        >>> optimizer.step()
        >>> bool((clip.factors()["self_attn"] < 1).all())
        True
        >>> clip.undo_()

    Source: Kimi Team, "Kimi K2", arXiv 2507.20534, §2.1 and algorithm 1 (MuonClip).
    Differs: for grouped and multi-query attention the query alone is scaled; a rotary part of a key that all heads
        share stays, as there, and the whole query of the head is scaled by γ_h.
    """
    check_arguments(limit)
    refuse_shards(model, "clip_qk_")
    check_optimizer(optimizer, model, "clip_qk_")
    real = real_optimizers(optimizer, verb="clip_qk_")
    refuse_averages(optimizer, "clip_qk_")
    found = anatomy(model, example=example)
    chosen, left = _chosen(model, found, parameter_ids(optimizer), where)
    with Edit(model, "clip_qk_") as edit:
        edit.acts_on = list(real)
        clip = _Clip(model, chosen, float(limit))
        edit.on_undo(clip.end_)
        clip.begin_(optimizer, found)
        named = dict(without_wrappers(model).named_parameters())
        parts = [part for block in chosen for head in block.query for part in head]
        expect_steps_(edit, optimizer, {part.tensor: named[part.tensor] for part in parts})
        for block in chosen:
            heads = {"heads": counted(block.heads, "head"), "size": block.head_size}
            edit.changed(block.path, say("logits of {heads} of {size} limited to {limit:g}", **heads, limit=limit))
        edit.note_stays(left)
    return Clipped(**vars(edit.done()), _clip=clip)


def check_arguments(limit: object = 100.0) -> None:
    """Refuse arguments of :func:`clip_qk_` that no model and no optimizer could make right."""
    if isinstance(limit, (int, float)):
        check_range("clip_qk_", limit=limit)
    if not (isinstance(limit, (int, float)) and not isinstance(limit, bool) and 0 < limit < math.inf):
        raise InvalidArgumentError("clip_qk_(limit=) is a positive number", repr(limit), "Pass e.g. 100.")


def clippable(model: nn.Module, where: Where = None, *, limit: float = 100.0) -> tuple[dict[str, str], frozenset[str]]:
    """The modules whose logits :func:`clip_qk_` would limit with an optimizer of all parameters, and what it scales.

    Args:
        where, limit: as :func:`clip_qk_` takes them. The model is not changed.

    Returns: by path, why a selected module with attention cannot be clipped, empty for one that can; and the paths of
        the layers with the queries and keys.

    Raises: as :func:`clip_qk_`, as far as the model decides it.

    Example:
        >>> from gonio.optim.clip_qk import clippable
        >>> clippable(nn.TransformerEncoderLayer(8, 2, 16))
        ({'self_attn': ''}, frozenset({'self_attn'}))
    """
    check_arguments(limit)
    chosen, left = _chosen(model, anatomy(model), {id(p) for p in model.parameters()}, where)
    heads = [head for block in chosen for head in (*block.query, *(block.key if _scales_keys(block) else ()))]
    layers = frozenset(part.tensor.rpartition(".")[0] for head in heads for part in head)
    return {**{block.path: "" for block in chosen}, **left}, layers


# --- which blocks -----------------------------------------------------------------------------------------------------


def _chosen(
    model: nn.Module, found: Anatomy, trained: set[int], where: Where
) -> tuple[list[Attention], dict[str, str]]:
    selector = as_selector(where)
    at = {site.path: site for site in sites(model)}
    parameters = dict(without_wrappers(model).named_parameters())
    reasons = dict(found.unknown)
    used = Counter(part.tensor for block in found.attention for part in {p for head in block.query for p in head})
    compiled = [f"{site.path}." for site in sites(model) if site.path and holds_original(site.module)]
    for block in found.attention:
        why = _why_not(block, parameters, trained)
        if any(f"{block.path}.".startswith(path) for path in compiled):
            why = say("it is inside a compiled part, which does not call its modules")
        if why is None and any(used[part.tensor] > block.heads for head in block.query for part in head):
            why = say("another attention has the same weights")
        if why is not None:
            reasons[block.path] = why
    able = [block for block in found.attention if block.path not in reasons]
    left = {path: why for path, why in reasons.items() if at[path].matches(selector)}
    chosen = [block for block in able if at[block.path].matches(selector)]
    if not chosen:
        raise NoMatchError("clip_qk_", asked_of(selector), [block.path for block in able], refused=left)
    for path, why in left.items() if where is not None else ():
        kind = at[path].kind
        raise NotApplicableError("clip_qk_", path, why, "Exclude it in `where`.", action="clip logits of", kind=kind)
    for block in chosen:
        hooks = at[block.around].module._forward_pre_hooks.values()
        if any(isinstance(hook, _Observe) and hook.acts for hook in hooks):
            raise AlreadyAppliedError("clip_qk_", block.path, "a clip of its logits")
    return chosen, left


def _why_not(block: Attention, parameters: Mapping[str, nn.Parameter], trained: set[int]) -> str | None:
    """Why the logits of a block cannot be clipped; None if they can."""
    if block.normed:
        return say("a norm follows its queries or keys, so that their scale has no effect")
    if not block.scales[0]:
        return say("its logits are not proportional to its queries, as with a cap or a bias of positions")
    if (why := why_not_observed(block)) is not None:
        return why
    parts = [part for head in (*block.query, *(block.key if _scales_keys(block) else ())) for part in head]
    for name in dict.fromkeys(name for part in parts for name in (part.tensor, part.bias) if name):
        if name not in parameters:
            return f"{name} is not found by its name, as inside a wrapper"
        if (why := why_not_dense(parameters[name])) is not None:
            return why
        if id(parameters[name]) not in trained:
            return f"{name} is not in the optimizer"
        if step_of_hold(parameters[name]) is not None:
            return f"{name} is held by hold_"
    return None


def _scales_keys(block: Attention) -> bool:
    """Whether each head has keys of its own."""
    return block.scales[1] and block.kv_heads == block.heads and not block.shared_key


# --- around a step ----------------------------------------------------------------------------------------------------


class _Clip:
    """What happens after the steps of an optimizer."""

    def __init__(self, model: nn.Module, blocks: Sequence[Attention], limit: float) -> None:
        self.blocks, self.limit = tuple(blocks), limit
        self.last: list[tuple[Attention, Tensor]] = []
        self._model = model
        self._observed: list[_Observe] = []
        self._ends: list[Any] = []
        self._steps, self._seen = 0, False
        self._copies = Copies(_UNSEEN)
        self._sums: dict[str, Sum] = {}  # of weights that the optimizer does not have
        self._optimizer: Callable[[], Any] = lambda: None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the figures of the last step, and observes none."""
        return _Clip, (self._model, self.blocks, self.limit), {"last": self.last}

    def begin_(self, optimizer: Optimizer, found: Anatomy) -> None:
        """Observe the forwards of the blocks' modules, and the optimizer's steps."""
        self._optimizer = weakref.ref(optimizer)
        self._observed = [_Observe(block, self.limit, weakref.ref(optimizer)) for block in self.blocks]
        self._ends += observing(self._observed, modules_at(self._model), found)
        self._ends.append(watch(optimizer, after=self._after, verb="clip_qk_"))

    def end_(self) -> None:
        """End it; can run again."""
        for end in self._ends:
            end()
        self._ends.clear()

    @torch.no_grad()
    def _after(self, optimizer: Optimizer) -> None:
        parameters = dict(without_wrappers(self._model).named_parameters())
        apart = self._refuse_copies(parameters, self._optimizer() or optimizer)
        self._clip(parameters)
        self._sums = {name: sum_of(weight) for name, weight in apart.items()}
        for weight in parameters.values():
            self._copies.left(weight)

    def _clip(self, parameters: Mapping[str, nn.Parameter]) -> None:
        seen = [(each.block, each.taken()) for each in self._observed]
        if several_ranks():
            if not is_replicated(self._model):
                why = "several processes train, and the logits of the others are not known"
                do = "Call clip_qk_ on the DistributedDataParallel that is around the model."
                raise NotApplicableError("clip_qk_", "", why, do, action="clip logits of")
            device = next(self._model.parameters()).device
            seen = [(block, _of_all(values, block, device)) for block, values in seen]
        self.last = [(block, values) for block, values in seen if values is not None]
        self._check_observed()
        if not self.last or not bool((torch.cat([values for _, values in self.last]) > self.limit).any()):
            return
        for block, values in self.last:
            factors = _factors(values, self.limit)
            for head in (factors != 1).nonzero().flatten().tolist():
                factor = float(factors[head])
                if _scales_keys(block):
                    factor = math.sqrt(factor)
                    _scale_(parameters, block.key[block.groups[head]], factor)
                _scale_(parameters, block.query[head], factor)

    def _refuse_copies(self, parameters: Mapping[str, nn.Parameter], optimizer: Any) -> dict[str, nn.Parameter]:
        """Raise where the next step undoes a clip, as it computes weights from copies; the weights without a group."""
        known = set[int]().union(*map(parameter_ids, with_inner(optimizer)))
        names = dict.fromkeys(part.tensor for block in self.blocks for head in block.query for part in head)
        weights = {name: parameters[name] for name in names if name in parameters}
        apart = {name: weight for name, weight in weights.items() if id(weight) not in known}
        for name, weight in weights.items():
            why = ""
            if name in apart and name in self._sums and differ(self._sums[name], sum_of(weight)):
                why = say("it changes, and the parameter groups of the optimizer do not have it any more")
            elif name not in apart and (where := self._copies.of(weight, optimizer)):
                why = say("each step computes it from a copy in a wider type ({where}), and undoes a clip", where=where)
            if why:
                do = "Train the weights themselves, in float32 under torch.autocast, instead of copies of them."
                raise NotApplicableError("clip_qk_", name, why, do)
        return apart

    def _check_observed(self) -> None:
        """Nothing was observed in the first steps: a clip without effect is said to be one."""
        self._steps, self._seen = self._steps + 1, self._seen or bool(self.last)
        if self._steps >= _UNSEEN and not self._seen:
            why = f"no logit was observed in the first {_UNSEEN} steps"
            do = "Train by calls of its attention modules in training mode, which must not be compiled."
            raise NotApplicableError("clip_qk_", "", why, do, action="clip logits of")


def _of_all(values: Tensor | None, block: Attention, device: torch.device) -> Tensor | None:
    """The largest of all processes; each of them takes part for every block."""
    values = torch.full((block.heads,), -math.inf, device=device, dtype=torch.float32) if values is None else values
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values if bool((values > -math.inf).any()) else None


def _factors(values: Tensor, limit: float) -> Tensor:
    """τ/S where S is above the limit and finite, else 1."""
    return torch.where((values > limit) & values.isfinite(), limit / values, torch.ones_like(values))


def _scale_(parameters: Mapping[str, nn.Parameter], parts: Sequence[Part], factor: float) -> None:
    for part in parts:
        for start, stop in part.rows:
            parameters[part.tensor].narrow(part.dim, start, stop - start).mul_(factor)
            if part.bias:
                parameters[part.bias].narrow(0, start + part.bias_start, stop - start).mul_(factor)


# --- logits -----------------------------------------------------------------------------------------------------------


class _Observe(Observer):
    """Keeps the largest logits of an attention in training since the last step."""

    def __init__(self, block: Attention, limit: float, optimizer: weakref.ref[Optimizer] | None = None) -> None:
        super().__init__(block)
        self.limit, self._optimizer = limit, optimizer
        self.largest: Tensor | None = None

    @property
    def acts(self) -> bool:
        """Whether its optimizer is there; without one, as in a copy of the model, nothing is observed."""
        return self._optimizer is not None and self._optimizer() is not None

    def wants(self, module: nn.Module) -> bool:
        """In training."""
        return module.training and self.acts

    def softmaxed(self, logits: Tensor, query: Tensor | None, key: Tensor | None) -> None:
        """All of them are there."""
        self._add(by_index(logits.amax((-2, -1)), self.block).amax(0))

    def multiplied(self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> None:
        """They are computed only if a bound exceeds the limit."""
        wide = torch.promote_types(query.dtype, torch.float32)
        norms = [torch.linalg.vector_norm(t, dim=-1, keepdim=True, dtype=wide) for t in (query, key)]
        largest = [t.amax((-2, -1)) for t in (norms[0], repeated(norms[1], query))]
        found = by_index(scale * largest[0] * largest[1], self.block).amax(0)
        if float(found.amax()) > self.limit:
            parts = logits_of(query, repeated(key, query), mask, causal, scale)
            most = torch.stack([logits.amax((-2, -1)) for logits, _ in parts]).amax(0)
            found = by_index(most, self.block).amax(0)
        self._add(found)

    def _add(self, values: Tensor) -> None:
        """The largest logits by index, in the order of the leading dimensions."""
        heads = by_head(values.float(), self.block, "amax")
        if heads is None:
            do = "Pass an example of two samples to clip_qk_."
            raise NotApplicableError("clip_qk_", self.block.path, ONE_SAMPLE, do, action="clip logits of")
        self.largest = heads if self.largest is None else torch.maximum(self.largest, heads)

    def taken(self) -> Tensor | None:
        """What was observed since the last step."""
        found, self.largest = self.largest, None
        return found

    def __deepcopy__(self, memo: Any) -> _Observe:
        return _Observe(self.block, self.limit)

    def __reduce__(self) -> Any:
        return _Observe, (self.block, self.limit)
