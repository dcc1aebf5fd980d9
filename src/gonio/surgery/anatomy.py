"""`anatomy`: which rows of which weights are queries, keys, values, gates, … of a transformer, found by running it."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gonio.editing.twin import without_wrappers
from gonio.editing.where import require_model, unwrapped
from gonio.errors import first_line, listing
from gonio.execution import derivatives
from gonio.messages import say
from gonio.surgery.blocks import Anatomy, Attention, Logits, Mlp
from gonio.surgery.equivalent import generated_example
from gonio.surgery.logits import Sides
from gonio.surgery.planned import planned
from gonio.surgery.products import LAYERS, MASKED, returned
from gonio.surgery.recording import Call, Part, Product, Recording, noise_like, random_mask, record, same

_SAMPLED = 16  # entries of a query that are looked at where they are not as many as the rows of a head
_Sources = dict[int, frozenset[int]]  # channels of the outputs of calls, by the number of the call


def anatomy(model: nn.Module | str | os.PathLike[str], *, example: Any = None) -> Anatomy:
    r"""Which rows of which weights are queries, keys, values, outputs, gates, … of a transformer.

    The model runs once in evaluation mode. Attention is where a product of two activations passes a softmax whose
    result multiplies a third one. The derivatives of queries, keys and values with respect to the outputs of the layers
    before name the rows that compute them, head by head; the derivatives of what the next layer reads, with respect to
    a head's queries, and the change of it if a head's values are zero, name the columns of that head. A block is given
    only if the rows of different heads are different ones, and if a head changes its own columns alone. Gate and up are
    told apart by the same means: the block is proportional to the outputs of `up`. No name of a class, a module or a
    parameter is looked at. What is not found is not given.

    A kernel that is no function of torch is registered as a module of its own: ``gonio.surgery.facts.register(Kernel,
    Facts(attends=lambda q, k, v: (q, k, v)))``. It is believed where it computes softmax attention in the run.

    The folder of a checkpoint, or a file in it, is known by its ``config.json``: transformers builds the model that it
    names, without weights, and one layer of each kind (the same classes, shapes and settings) runs with random ones. No
    code of the folder runs, and nothing is downloaded. Names are those of the model of transformers. Without
    transformers, or for a class that it does not have, nothing is known but what `unknown` says.

    Args:
        model: a model, or a path.
        example: an input, as :func:`gonio.equivalent` takes it, of at least two tokens; None for a generated one.

    Raises:
        InvalidArgumentError: if no example is given and none can be made for a model; for a path without a
            ``config.json``.
        UnreadableFileError: for a damaged ``config.json``.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> found = gonio.surgery.anatomy(layer)
        >>> print(found)
        1 attention block, 1 MLP
          self_attn  attention: 2 heads of 4
          linear2    MLP: 16 units
        >>> [str(part) for part in found.attention[0].key[1]], str(found.attention[0].output[1])
        (['self_attn.in_proj_weight[12:16]'], 'self_attn.out_proj.weight[:, 4:8]')
    """
    if not isinstance(model, (str, os.PathLike)):
        require_model(model, "anatomy")
        return _found_in(model, example)
    plan = planned(Path(model))
    if isinstance(plan, str):
        return replace(_NOTHING, unknown={"": plan})
    try:
        return plan.whole(_found_in(plan.model, example))
    except Exception as error:  # the model of a configuration can raise anything
        said = first_line(error, kind=True)
        return replace(_NOTHING, unknown={"": say("the model of its configuration was not run ({error})", error=said)})


_NOTHING = Anatomy((), (), (), (), (), (), (), {})


def _found_in(model: nn.Module, example: Any) -> Anatomy:
    inner = unwrapped(model)
    given = generated_example(inner) if example is None else example
    with torch.inference_mode(False), torch.enable_grad():
        return _taken_apart(without_wrappers(inner), record(inner, given))


def _taken_apart(model: nn.Module, run: Recording) -> Anatomy:
    unknown = dict(run.unknown)
    blocks: dict[tuple[str, Any], Attention] = {}
    for product in run.products:
        if product.value is None and product.passed & LAYERS:  # of a router or a classifier further on
            continue
        found = _block_of(model, run, product)
        if isinstance(found, str):
            unknown[product.path] = found
        else:
            before = blocks.setdefault((found.path, found.query), found)
            if before.logits != found.logits:  # of a module that runs twice
                found = replace(found, logits=None)
            blocks[found.path, found.query] = found
    read = {part.tensor for block in blocks.values() for part in block.output}
    names: dict[int, list[str]] = {}
    for name, parameter in run.parameters.items():
        names.setdefault(id(parameter), []).append(name)
    direct = [x for x in returned(run.outputs) if x.is_floating_point() and x.ndim]
    arounds = Counter(block.around for block in blocks.values()) + Counter(list(unknown))
    return Anatomy(
        tuple(replace(block, alone=arounds[block.around] == 1) for block in blocks.values()),
        tuple(dict.fromkeys(mlp for mlp in _mlps(run) if mlp.down.tensor not in read)),
        tuple(dict.fromkeys(name for name, _ in run.tables)),
        tuple(dict.fromkeys(call.tensor for x in direct if (call := _one(run, x)) is not None)),
        tuple(dict.fromkeys(call.tensor for _, x in run.chosen if (call := _one(run, x)) is not None)),
        tuple(run.norms),
        tuple(tuple(each) for each in names.values() if len(each) > 1),
        {path: why for path, why in unknown.items() if all(block.path != path for block in blocks.values())},
        tuple(dict.fromkeys((call.tensor, call.out_dim > call.in_dim) for call in run.calls if call.out_dim and
                            call.in_dim and run.parameters[call.tensor].ndim == 3)),
    )  # fmt: skip


def _block_of(model: nn.Module, run: Recording, product: Product) -> Attention | str:
    """A block, or why it is not known."""
    if product.value is None or product.out is None:
        return say("the softmax multiplies no values")
    if product.mixed or product.passed & LAYERS:
        return say("a layer with a weight of its own computes its logits or shares from those of all heads")
    try:
        return _Block(model, run, product, product.value, product.out).taken_apart()
    except RuntimeError as error:  # a function of the model's own
        return say("derivatives cannot be computed: {error}", error=first_line(error, 80))


def _one(run: Recording, x: Tensor) -> Call | None:
    """The only layer from which a tensor is computed directly, if its outputs are the tensor's last entries."""
    try:
        found = _sources(x, run.calls)
        tables = _reached([x], [table for _, table in run.tables])
    except RuntimeError:
        return None
    first = next(iter(found), None)
    if len(found) != 1 or first is None or tables:
        return None
    made = run.calls[first]
    return made if made.channel == -1 and made.out.shape[-1] == x.shape[-1] else None


# --- derivatives ------------------------------------------------------------------------------------------------------


def _gradients(x: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of a random sum of the entries."""
    if not x.requires_grad or not inputs:
        return [None] * len(inputs)
    found = derivatives((x * noise_like(x, "anatomy")).sum(), inputs, retain_graph=True, allow_unused=True)
    return list(found)


def _reached(xs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Those of the inputs on which any of the tensors depends."""
    found = [_gradients(x, inputs) for x in xs]
    return [t for t, *gs in zip(inputs, *found, strict=True) if any(g is not None and bool((g != 0).any()) for g in gs)]


def _channels(gradient: Tensor, dim: int) -> frozenset[int]:
    """The indices along a dimension at which any entry is not 0."""
    there = (gradient != 0).movedim(dim, 0).flatten(1).any(1) if gradient.ndim > 1 else gradient != 0
    return frozenset(there.nonzero().flatten().tolist())


def _sources(x: Tensor, calls: Sequence[Call]) -> _Sources:
    """The outputs of layers, channel by channel, on which a tensor depends directly."""
    gradients = _gradients(x, [each.out for each in calls])
    found = {n: _channels(g, calls[n].channel) for n, g in enumerate(gradients) if g is not None}
    return {n: channels for n, channels in found.items() if channels}


# --- one attention block ----------------------------------------------------------------------------------------------


class _Block:
    """What is found of one product of queries and keys."""

    def __init__(self, model: nn.Module, run: Recording, product: Product, value: Tensor, out: Tensor) -> None:
        self.model, self.run, self.product, self.value, self.out = model, run, product, value, out
        self.calls = run.calls[: product.calls]
        self.query, self.key = product.query, product.key

    def taken_apart(self) -> Attention | str:
        """The block, or why it is not known."""
        if self.key.shape[-2] < 2:
            return say("its softmax is over one key: pass an example of more tokens")
        self._spread()
        dims = [d for d in range(self.query.ndim - 2) if self.query.shape[d] > 1 and self._counts_heads(d)]
        indices = list(itertools.product(*(range(self.query.shape[d]) for d in dims)))
        heads: dict[Any, int] = {}  # by the sources of its query
        keys: list[_Sources] = []
        values: list[_Sources] = []
        order: list[int] = []
        for index in indices:
            place = dict(zip(dims, index, strict=True))
            query, key, value = (self._at(t, place) for t in (self.query, self.key, self.value))
            if not (query and key and value):
                return say("a query, key or value is computed by no layer with a weight")
            order.append(heads.setdefault(frozenset(query.items()), len(heads)))
            if order[-1] == len(keys):
                keys.append(key)
                values.append(value)
            elif keys[order[-1]] != key or values[order[-1]] != value:
                return say("the rows of its heads cannot be told apart")
        return self._of_heads([dict(each) for each in heads], keys, values, (dims, order))

    def _spread(self) -> None:
        """Give queries, keys and values the same leading dimensions; those of fewer heads are repeated."""
        tensors = [self.query, self.key, self.value]
        dims = max(t.ndim for t in tensors)
        whole = next(t.shape[:-2] for t in tensors if t.ndim == dims)
        tensors = [t.reshape(*whole, *t.shape[-2:]) if t.shape[:-2].numel() == whole.numel() else t for t in tensors]
        tensors = [t.reshape(*[1] * (dims - t.ndim), *t.shape) for t in tensors]
        for d in range(dims - 2):
            size = max(t.shape[d] for t in tensors)
            tensors = [t.repeat_interleave(size // t.shape[d], d) if t.shape[d] < size else t for t in tensors]
        self.query, self.key, self.value = tensors

    def _counts_heads(self, dim: int) -> bool:
        return any(
            _sources(t.select(dim, 0), self.calls) != _sources(t.select(dim, t.shape[dim] - 1), self.calls)
            for t in (self.query, self.value)
        )

    def _at(self, tensor: Tensor, place: Mapping[int, int]) -> _Sources:
        return _sources(self._selected(tensor, place), self.calls)

    def _selected(self, tensor: Tensor, place: Mapping[int, int]) -> Tensor:
        for dim in reversed(range(tensor.ndim - 2)):
            tensor = tensor.select(dim, place.get(dim, 0))
        return tensor

    def _of_heads(
        self, queries: list[_Sources], keys: list[_Sources], values: list[_Sources], places: Any
    ) -> Attention | str:
        shared: _Sources = {}
        if any(key != keys[0] for key in keys):  # a part of the keys may be common to all heads
            shared = {n: frozenset.intersection(*(key.get(n, frozenset()) for key in keys)) for n in keys[0]}
            keys = [{n: rest for n, c in key.items() if (rest := c - shared.get(n, frozenset()))} for key in keys]
        own_keys, groups = _distinct(keys)
        own_values, of_values = _distinct(values)
        if groups != of_values:
            return say("its heads share keys and values differently")
        everything = [*queries, *own_keys, *own_values, *([shared] if any(shared.values()) else [])]
        if not all(_apart(a, b) for a, b in itertools.combinations(everything, 2)):
            return say("the rows of its heads, or of its queries, keys and values, are not different ones")
        later = self.run.calls[self.product.calls :]
        reader = next((call for call in later if call.pointwise and _reached([call.x], [self.out])), None)
        if reader is None:
            return say("no layer reads its result")
        output = self._columns(reader, queries, own_values, groups)
        if isinstance(output, str):
            return output
        query, key, value = (tuple(self._rows(each) for each in some) for some in (queries, own_keys, own_values))
        dims, order = places
        normed = self._normed([self.query, self.key], [*queries, *keys])
        scales = (False, False) if normed else (self._scales(queries), self._scales([*keys, shared]))
        products = self.query @ self.key.mT
        linear = (not normed and self._proportional(products, queries),
                  not normed and self._proportional(products, [*keys, shared]),
                  not self._normed([reader.x], own_values) and self._proportional(reader.x, own_values))  # fmt: skip
        where = tuple(d - self.query.ndim for d in dims), tuple(order)
        entries, logits = self._entries(self.query, queries[0]), None
        if normed or all(linear[:2]):
            whole = [{n: channels | shared.get(n, frozenset()) for n, channels in each.items()} for each in keys]
            whole = [{**{n: c for n, c in shared.items() if c}, **each} for each in whole]
            maps = entries, self._entries(self.key, whole[0])
            logits = self._logits(places, (queries, whole), groups, normed, maps)
        return Attention(
            self.product.path, query, key, value, output, tuple(groups), self._rows(shared),
            _rotation(entries), normed, scales, linear, logits, where, kernel=self.product.kernel,
            around=self.product.around,
        )  # fmt: skip

    def _logits(
        self, places: Any, rows: tuple[list[_Sources], list[_Sources]], groups: list[int], normed: bool, maps: Any
    ) -> Logits | None:
        """From which norms' results its logits are computed."""
        dims, order = places
        indices = list(itertools.product(*(range(self.query.shape[d]) for d in dims)))
        at: list[list[Any]] = [[i for i, n in zip(indices, order, strict=True) if n == h] for h in range(len(groups))]

        def by_head(tensor: Tensor) -> list[Tensor]:
            moved = tensor.movedim(dims, list(range(len(dims))))
            return [torch.cat([moved[i].reshape(-1, tensor.shape[-1]) for i in mine]) for mine in at]

        tensors = by_head(self.query), by_head(self.key)
        return Sides(self.run, self.model, rows, tensors, groups, normed, maps).logits(self.product)

    def _rows(self, sources: _Sources) -> tuple[Part, ...]:
        return tuple(self.calls[n].part(sorted(channels)) for n, channels in sources.items() if channels)

    def _scales(self, sources: list[_Sources]) -> bool:
        """Whether the logits are proportional to what these rows give: their derivative along it is they themselves."""
        if self.product.passed:
            return False
        logits = self.query @ self.key.mT if self.product.logits is None else self.product.logits
        return self._proportional(torch.where(logits > MASKED, logits, torch.zeros_like(logits)), sources)

    def _proportional(self, x: Tensor, sources: list[_Sources]) -> bool:
        """Whether a tensor is proportional to what these rows give, biases included."""
        if not all(self.calls[n].plain for each in sources for n in each):
            return False
        joined: dict[int, frozenset[int]] = {}
        for each in sources:
            joined.update({n: joined.get(n, frozenset()) | channels for n, channels in each.items()})
        return same(_changes(x, [joined], self.calls)[0], x)

    def _normed(self, xs: Sequence[Tensor], sources: list[_Sources]) -> bool:
        """Whether a norm lies between these rows and any of the tensors."""
        used = list({n: None for each in sources for n in each})
        for norm in _norms_between(self.run, xs, [self.calls[n].out for n in used]):
            gradients = zip(used, _gradients(norm, [self.calls[n].out for n in used]), strict=True)
            found = {n: _channels(g, self.calls[n].channel) for n, g in gradients if g is not None}
            if not all(_apart(each, found) for each in sources):
                return True
        return False

    def _entries(self, tensor: Tensor, sources: _Sources) -> list[frozenset[Any]]:
        """For each entry of the first head's last query, or key, the rows on which it depends."""
        entries = self._selected(tensor, {})[-1]
        if len(entries) != sum(map(len, sources.values())):  # positions, as between channels
            entries = entries[:: -(-len(entries) // _SAMPLED)]
        outs = [self.calls[n].out for n in sources]
        return [frozenset((n, c) for n, g in zip(sources, _gradients(entry, outs), strict=True) if g is not None
                          for c in _channels(g, self.calls[n].channel)) for entry in entries]  # fmt: skip

    def _columns(
        self, reader: Call, queries: list[_Sources], values: list[_Sources], groups: list[int]
    ) -> tuple[Part, ...] | str:
        """For each head the columns of the next layer, that its queries and its values change and no others do."""
        of_queries = self._moved(reader, queries)
        of_values = self._moved(reader, values)
        shared = len(of_values) < len(of_queries)
        for group, columns in enumerate(of_values):
            mine = frozenset[int]().union(*(of_queries[h] for h, g in enumerate(groups) if g == group))
            # a softmax that is saturated in the run has no derivative by its queries
            if not columns or not (mine == columns if shared else mine <= columns):
                return say(
                    "its heads are mixed: changes of a head's queries and of its values act on different columns"
                )
        if not shared:
            of_queries = [of_values[group] for group in groups]
        rows = [sum(len(channels) for channels in each.values()) for each in values]
        if any(len(columns) != rows[group] for columns, group in zip(of_queries, groups, strict=True)):
            added = [self.calls[n].path for each in values if sum(map(bool, each.values())) > 1 for n in each]
            if added:
                names = listing(sorted(set(added)), limit=4)
                return say("its values are sums of what several layers give: {names}", names=names)
            return say("a head does not have as many columns as values, or some of them are 0 in the run")
        if sum(map(len, of_queries)) != len(frozenset[int]().union(*of_queries)):
            return say("its heads are mixed before the next layer")
        return tuple(Part.of(reader.tensor, sorted(columns), reader.in_dim) for columns in of_queries)

    def _moved(self, reader: Call, heads: list[_Sources]) -> list[frozenset[int]]:
        """The channels of what a layer reads that change with the outputs of a head's rows."""
        return [_channels(moved, reader.channel) for moved in _changes(reader.x, heads, self.calls)]


def _rotation(entries: Sequence[frozenset[tuple[int, int]]]) -> Literal["", "half", "pairs"] | None:
    """Whether an entry of a query depends on two rows, as after a rotation, and how far they are apart."""
    rows = [sorted(row for _, row in each) for each in entries]
    kinds = {0 if len(each) == 1 else each[1] - each[0] if len(each) == 2 else -1 for each in rows}
    if -1 in kinds:
        return None
    return "" if kinds == {0} else "pairs" if kinds <= {0, 1} else "half"


def _changes(x: Tensor, parts: Sequence[_Sources], calls: Sequence[Call]) -> list[Tensor]:
    """For each part the derivative of x along its outputs: where x is linear, what x loses without them."""
    used = list({n: None for part in parts for n in part})
    weight = noise_like(x, "anatomy").requires_grad_()
    outs = [calls[n].out for n in used]
    gradients = derivatives((x * weight).sum(), outs, create_graph=True, retain_graph=True, allow_unused=True)
    found = []
    for part in parts:
        total = torch.zeros((), dtype=weight.dtype, device=weight.device)
        for n, out, gradient in zip(used, outs, gradients, strict=True):
            if gradient is not None and n in part:
                rows = torch.tensor(sorted(part[n]), device=out.device)
                mine = torch.zeros_like(out).index_fill_(calls[n].channel, rows, 1)
                total = total + (gradient * (out.detach() * mine)).sum()
        moved = derivatives(total, [weight], retain_graph=True)[0] if total.requires_grad else None
        found.append(torch.zeros_like(weight) if moved is None else moved)
    return found


def _distinct(sources: list[_Sources]) -> tuple[list[_Sources], list[int]]:
    """The different ones, and for each the number of its own."""
    numbers: dict[Any, int] = {}
    order = [numbers.setdefault(frozenset(each.items()), len(numbers)) for each in sources]
    return [dict(each) for each in numbers], order


def _apart(a: _Sources, b: _Sources) -> bool:
    return all(not (channels & b.get(n, frozenset())) for n, channels in a.items())


# --- feed-forward blocks ----------------------------------------------------------------------------------------------


def _mlps(run: Recording) -> Iterator[Mlp]:
    for number, reader in enumerate(run.calls):
        try:
            found = _mlp_of(run, reader, run.calls[:number]) if reader.pointwise and reader.x.numel() else None
        except RuntimeError:  # a function of the model's own has no derivative
            found = None
        if found is not None:
            yield found


def _mlp_of(run: Recording, reader: Call, before: Sequence[Call]) -> Mlp | None:
    """The block whose last layer is the reader, if it is one."""
    calls = [before[n] for n in _sources(reader.x, before)]
    if not 1 <= len(calls) <= 2 or _reached([reader.x], [x for _, x in run.tables]):
        return None
    units, outs = reader.x.shape[reader.channel], [call.out for call in calls]
    halves = _halves([(call, call.out) for call in calls], units, reader.x.numel() // units)
    if not halves or not _entrywise(reader, calls, halves) or _norms_between(run, [reader.x], outs):
        return None
    up, gate, degree = _roles(reader, outs, halves)
    weight = run.parameters[calls[0].tensor]
    stacked = weight.shape[0] if weight.ndim == 3 and reader.channel == -1 else 0
    down = Part.of(reader.tensor, range(units), reader.in_dim)
    return None if up is None else Mlp(reader.path, up, down, gate, stacked, degree)


def _norms_between(run: Recording, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """Results of norms of these outputs, on which any of the tensors depends."""
    return [t for t in _reached(xs, run.normed) if any(g is not None for g in _gradients(t, outs))]


_Half = tuple[Part, int, slice]  # the rows, the number of the call's output, and its channels


def _halves(found: list[tuple[Call, Tensor]], units: int, positions: int) -> list[_Half]:
    """The one or two parts that give as many outputs as the reader has inputs; none where the sizes do not fit."""
    sizes = [out.shape[call.channel] for call, out in found]
    if any(not call.pointwise or out.numel() // out.shape[call.channel] != positions for call, out in found):
        return []
    if sizes == [2 * units]:
        call = found[0][0]
        return [
            (call.part(range(units)), 0, slice(0, units)),
            (call.part(range(units, 2 * units)), 0, slice(units, None)),
        ]
    if any(size != units for size in sizes):
        return []
    return [(call.part(range(units)), n, slice(None)) for n, (call, _) in enumerate(found)]


def _entrywise(reader: Call, calls: Sequence[Call], halves: Sequence[_Half]) -> bool:
    """Whether each entry of what a layer reads depends on one entry of each part alone, at the same position."""
    shown = random_mask(reader.x.shape, "anatomy", 1).to(reader.x.device)
    total = (reader.x * noise_like(reader.x, "anatomy") * shown).sum()
    gradients = derivatives(total, [call.out for call in calls], retain_graph=True)
    for _, n, channels in halves:
        mine = gradients[n].movedim(calls[n].channel, -1)[..., channels]
        if bool((mine[~shown.movedim(reader.channel, -1).reshape(mine.shape)] != 0).any()):
            return False
    return True


def _roles(reader: Call, outs: list[Tensor], halves: list[_Half]) -> tuple[Part | None, Part | None, int]:
    """Which part is up, which is the gate, and :attr:`Mlp.degree`; (None, None, 0) where that is not known."""
    noise = noise_like(reader.x, "anatomy")
    gradients = derivatives((reader.x * noise).sum(), outs, retain_graph=True)
    terms = (reader.x * noise).detach().movedim(reader.channel, -1)
    if len(halves) == 1:
        slopes, out = (t.detach().movedim(reader.channel, -1).reshape(terms.shape) for t in (gradients[0], outs[0]))
        if bool(((ratio := slopes / noise.movedim(reader.channel, -1)) - ratio.flatten()[0]).abs().max() < 1e-5):
            return None, None, 0
        return halves[0][0], None, next((n for n in (1, 2) if same(slopes * out, n * terms)), 0)
    linear, positive = [], []
    for _, n, channels in halves:
        g, out = (t.detach().movedim(reader.channel, -1)[..., channels] for t in (gradients[n], outs[n]))
        linear.append(same(g * out, terms))
        active = reader.x.movedim(reader.channel, -1).reshape(out.shape) != 0
        positive.append(bool((out[active] >= 0).all()))
    if linear == [True, True]:  # the gate of ReLU is where both are proportional
        linear = [not p for p in positive]
    if linear not in ([True, False], [False, True]):
        return None, None, 0
    return (halves[0][0], halves[1][0], 1) if linear[0] else (halves[1][0], halves[0][0], 1)
