"""What logits are computed from: the results of norms, whose length is known, found by running the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gonio.execution import derivatives
from gonio.surgery.blocks import Logits, Normalized
from gonio.surgery.products import MASKED, Product
from gonio.surgery.recording import Call, Normed, Part, Recording, noise_like, same, without_hooks

_EQUAL = 1e-4  # relative; of lengths and of what a norm computes, in the model's own dtype
_ALIKE = 0.02  # relative; of what a norm computes, in any dtype
_LARGE = 1e3  # of inputs to a norm, beside which its eps is nothing


class Sides:
    """One block's queries and keys, and the rows of the layers that compute them.

    Args:
        rows: for the queries and for the keys, by head, the channels of the outputs of calls.
        tensors: queries and keys by head, each (…, size).
        groups: for each head the number of its key/value head.
        normed: whether a norm follows the layers. `maps`: for the queries and for the keys, for each entry the channels
            on which it depends; None where that is not known.
    """

    def __init__(
        self, run: Recording, model: nn.Module, rows: tuple[Any, Any], tensors: tuple[list[Tensor], list[Tensor]],
        groups: Sequence[int], normed: bool, maps: tuple[Any, Any],
    ) -> None:  # fmt: skip
        self._run, self._model, self._rows, self._tensors = run, model, rows, tensors
        self._groups, self._normed, self._maps = groups, normed, maps

    def logits(self, product: Product) -> Logits | None:
        """How the logits are computed; None where that is not known."""
        scale = _scale(product)
        query, key = self._side(0), self._side(1)
        if scale is None or query is None or key is None:
            return None
        return Logits(query, key, scale, _turned(*self._maps))

    def _side(self, side: int) -> Normalized | None:
        rows: list[Mapping[int, frozenset[int]]] = self._rows[side]
        calls = {n for each in rows for n in each}
        if len(calls) != 1:
            return None
        (number,) = calls
        call = self._run.calls[number]
        channels = [sorted(each[number]) for each in rows]
        out = call.out.detach().movedim(call.channel, -1)
        if self._normed:
            return self._after(side, call, channels)
        norm = _result_of(self._run, call)
        factor = _ratio(self._tensors[side], [out[..., each] for each in channels])
        return None if norm is None or factor is None else _normalized(self._model, norm, factor, after=False)

    def _after(self, side: int, call: Call, channels: list[list[int]]) -> Normalized | None:
        """The last norm after the layer whose results are as long as the queries."""
        size, first = len(channels[0]), [head == list(self._groups).index(g) for head, g in enumerate(self._groups)]
        once = [t for t, mine in zip(self._tensors[side], first, strict=True) if mine or side == 0]
        width = call.out.shape[call.channel]
        for norm in _norms_of(self._run):
            if norm.out.shape[-1] not in (size, width) or not _depends(norm.out, call.out):
                continue
            if not _depends(once[0], norm.out):  # the norm of the other side gives the same lengths where gains are 1
                continue
            if norm.out.shape[-1] == size:
                factor = _ratio([torch.cat([t.reshape(-1, size) for t in once])], [norm.out.detach()])
            else:
                distinct = list(dict.fromkeys(map(tuple, channels)))
                if [c for each in distinct for c in each] != list(range(width)):
                    return None
                factor = _ratio(self._tensors[side], [norm.out.detach()[..., each] for each in channels])
            if factor is not None:
                return _normalized(self._model, norm, factor, after=True)
        return None


def _scale(product: Product) -> float | None:
    """The derivative of the logits by the products; None where it is no constant."""
    query, key, logits = product.query, product.key, product.logits
    if product.passed:
        return None
    if logits is None:  # of a kernel
        return query.shape[-1] ** -0.5 if product.scale is None else product.scale
    if not logits.requires_grad or logits.numel() != query.shape[:-1].numel() * key.shape[-2]:
        return None
    seen = (logits > MASKED) & logits.isfinite()
    noise = noise_like(logits, "logits") * seen
    found: Tensor | None = derivatives(logits, [query], noise, retain_graph=True, allow_unused=True)[0]
    if found is None:
        return None
    found = found.double()  # the two may have other dtypes than the logits
    expected = noise.double().reshape(*query.shape[:-1], key.shape[-2]) @ key.detach().double()
    scale = float((found * expected).sum() / expected.square().sum())
    return _rounded(scale) if same(found, scale * expected, _EQUAL) else None


def _turned(query: Sequence[frozenset[int]] | None, key: Sequence[frozenset[int]] | None) -> tuple[int, ...] | None:
    """Which entries positions turn among themselves, from the rows on which each entry of a head depends."""
    if query is None or key is None:
        return (0,) * len(query or key or (0,))
    size = len(query)
    places = [{row: n for n, row in enumerate(sorted(frozenset[int]().union(*each)))} for each in (query, key)]
    sets = [[frozenset(at[row] for row in rows) for rows in each]
            for at, each in zip(places, (query, key), strict=True)]  # fmt: skip
    together = [a | b for a, b in zip(*sets, strict=True)] if len(sets[0]) == len(sets[1]) else []
    closed = all(n in each and all(m < size and together[m] == each for m in each) for n, each in enumerate(together))
    if not together or not closed or any(len(at) != size for at in places):
        return (0,) * size
    return None if all(len(each) == 1 for each in together) else tuple(min(each) for each in together)


def _result_of(run: Recording, call: Call) -> Normed | None:
    """The norm of whose results each vector that a layer reads is one."""
    vectors = call.x.detach().movedim(call.channel, -1).flatten(0, -2)
    for norm in _norms_of(run):
        own = norm.out.detach().flatten(0, -2)
        if own.shape[-1] != vectors.shape[-1] or own.dtype != vectors.dtype or not len(vectors):
            continue
        known = bool((own == vectors[0]).all(-1).any()) and _bytes(vectors) <= _bytes(own)
        if known and _depends(call.x, norm.out):  # another norm may give the same
            return norm
    return None


def _norms_of(run: Recording) -> list[Normed]:
    """Latest first; a module before the function that it may call."""
    return [*reversed(run.gained), *reversed(run.functional)]


def _bytes(vectors: Tensor) -> set[bytes]:
    return {bytes(row) for row in vectors.cpu().contiguous().view(torch.uint8).numpy()}


def _ratio(found: Sequence[Tensor], of: Sequence[Tensor]) -> float | None:
    """By what vectors are longer than others, which may have another order; None where it differs between them."""
    ratios = []
    for a, b in zip(found, of, strict=True):
        lengths = [t.detach().double().reshape(-1, t.shape[-1]).norm(dim=-1).sort().values for t in (a, b)]
        if len(lengths[0]) != len(lengths[1]) or bool(((lengths[0] == 0) != (lengths[1] == 0)).any()):
            return None
        there = lengths[1] > 0  # a token of padding may be 0
        ratios.append(lengths[0][there] / lengths[1][there])
    every = torch.cat(ratios)
    if not len(every):
        return None
    mean = float(every.mean())
    return _rounded(mean) if bool(((every - mean).abs() <= _EQUAL * mean).all()) else None


def _rounded(measured: float) -> float:
    """To the digits that every run has."""
    return float(f"{measured:.5g}")


def _depends(out: Tensor, on: Tensor) -> bool:
    if not out.requires_grad:
        return False
    found: Tensor | None = derivatives(out.sum(), [on], retain_graph=True, allow_unused=True)[0]
    return found is not None and bool((found != 0).any())


def _normalized(model: nn.Module, norm: Normed, factor: float, *, after: bool) -> Normalized | None:
    """What a norm computes on large inputs; None where it is neither of the two kinds."""
    count = norm.x.shape[-1]
    if norm.kind:
        (gain,) = norm.gains or ("",)
        part = Part.of(gain, range(count), 0, norm.shift) if gain else None
        return None if norm.shift and not gain else Normalized(norm.kind, count, part, 0.0, after, factor)
    module = model.get_submodule(norm.path)
    own = {n: p for n, p in module._parameters.items() if p is not None}
    gain, shift, added = "", "", 1.0
    if own:
        local = next((n for n in own if f"{norm.path}.{n}".removeprefix(".") in norm.gains), "")
        facts = facts_of_norm(module, norm.x, local) if local and len(norm.gains) == 1 else None
        if facts is None:
            return None
        gain, (added, shift) = local, facts
    kind = _kind(module, norm.x, {n: 1 - added if n == gain else 0.0 for n in own})
    if kind is None or any(p.shape != (count,) for p in own.values()):
        return None
    names = [f"{norm.path}.{n}".removeprefix(".") if n else "" for n in (gain, shift)]
    part = Part.of(names[0], range(count), 0, names[1]) if gain else None
    return Normalized(kind, count, part, added, after, factor)


def _kind(module: nn.Module, like: Tensor, values: Mapping[str, float]) -> Literal["rms", "layer"] | None:
    x = _LARGE * noise_like(like, "logits", 1)
    own = {n: torch.full_like(module._parameters[n], value) for n, value in values.items()}  # type: ignore[arg-type]
    with torch.no_grad():
        out = torch.func.functional_call(without_hooks(module).eval(), own, (x,))
    centred = x - x.mean(-1, keepdim=True)
    kinds: dict[Literal["rms", "layer"], Tensor] = {"rms": x, "layer": centred}
    for kind, each in kinds.items():
        if same(out, each / each.square().mean(-1, keepdim=True).sqrt(), _EQUAL):
            return kind
    return None


def facts_of_norm(module: nn.Module, x: Tensor, gain: str) -> tuple[float, str] | None:
    """What a norm adds to its gain, 0 or 1, and the name of its shift; None where it computes something else."""
    twin = without_hooks(module).eval()
    own = {n: torch.zeros_like(p) for n, p in module._parameters.items() if p is not None}
    shift = next((n for n in own if n != gain), "")
    if len(own) > 2:
        return None

    def with_values(**values: float) -> Tensor:
        tensors = {n: torch.full_like(p, values.get(n, 0.0)) for n, p in own.items()}
        out: Tensor = torch.func.functional_call(twin, tensors, (x,))
        return out.double()

    with torch.no_grad():
        zero, one = with_values(), with_values(**{gain: 1.0})
        shifted = with_values(**{shift: 1.0}) - zero if shift else torch.ones((), device="cpu", dtype=torch.float32)
    slope = one - zero
    added = float(((zero * slope).sum() / slope.square().sum()).round())
    same = bool((zero - added * slope).abs().max() <= _ALIKE * slope.abs().max())
    return (added, shift) if added in (0, 1) and same and bool(((shifted - 1).abs() <= _ALIKE).all()) else None
