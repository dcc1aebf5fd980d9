"""`recycle_`: draw dead and duplicate filters anew, with the function unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from gonio.editing.edit import Edit, Edited
from gonio.editing.twin import evaluating
from gonio.editing.where import Where, left_out, modules_at, refuse_meta, refuse_shards, select, sites
from gonio.errors import InvalidArgumentError, NotApplicableError, listing
from gonio.geometry import layout_of, matrix_view, near_duplicates, unview
from gonio.geometry.chance import expected_pairs_above
from gonio.geometry.duplicates import ROUNDING
from gonio.geometry.views import why_not_dense
from gonio.messages import Message, fixed, joined, say
from gonio.seeding import generator
from gonio.surgery.channels import OutputChannels, Reading, output_channels
from gonio.surgery.equivalent import SAME_OUTPUTS, SameFunction, call, first_input
from gonio.surgery.facts import WEIGHTED, computes_plainly
from gonio.surgery.graph import trace

_STARTS = {"running_mean": 0.0, "running_var": 1.0, "weight": 1.0, "bias": 0.0}  # of a batch norm's channel
_EXPECTED = 1e-4  # proportional pairs of random filters, from which on such pairs tell nothing


def recycle_(model: nn.Module, *, example: Any = None, where: Where = None, weak: float = 0.0, seed: int = 0) -> Edited:
    r"""Draw dead and duplicate filters anew and set their outgoing weights to 0; the function stays.

    A *dead* filter's weights are all 0: behind activations and batch norms in evaluation mode its channel is a constant
    :math:`k`. A *duplicate* is proportional to an earlier filter of its layer, bias included, and so is its channel,
    :math:`a_j = c\,a_i`. With the weights V of the layers that read the channels,

    .. math::
        \text{dead:}\; b \leftarrow b + k\,V_{:,j}, \qquad
        \text{duplicate:}\; V_{:,i} \leftarrow V_{:,i} + c\,V_{:,j}, \qquad
        \text{then}\; V_{:,j} \leftarrow 0,

    and the filter gets a random direction, the median norm of the layer's other filters, and the bias 0. It has no
    effect until training gives it outgoing weights, whose gradients are not 0. A batch norm in between starts anew in
    these channels: gain 1, shift 0, and the statistics of `example`, or 0 and 1 without one.

    The layers that read a filter's channel are found on the graph that `torch.fx` traces. A filter stays, with a note
    that gives the reason, where they are not all known (its output is added to another tensor, or is the model's),
    where a constant is cut off by zero padding or has no bias to go to, and where the channel of an opposite or scaled
    filter is no multiple behind the activation.

    Args:
        example: an input on which the outputs before and after are compared, with a note; None for one that is made
            from the model's first layer, if that can be done.
        where: which layers; None for all linear and convolutional ones.
        weak: filters whose norm is below this multiple of the layer's median count as dead, too. The function then
            changes by what they contribute; the deviation is noted, and no limit is set to it.
        seed: of the new filters.

    Raises:
        NoMatchError: if `where` selects no linear or convolutional layer.
        InvalidArgumentError: if `weak` is not in [0, 1).
        NotApplicableError: if there are such filters and none of them can be drawn anew, if the model is sharded, or if
            the outputs changed by more than rounding; the model is restored.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)).double()
        >>> with torch.no_grad():
        ...     _ = model[0].weight[1].zero_(), model[0].weight[4].copy_(2 * model[0].weight[3])
        ...     _ = model[0].bias[4].copy_(2 * model[0].bias[3])
        >>> x = torch.randn(5, 8, dtype=torch.float64)
        >>> before = model(x)
        >>> print(gonio.recycle_(model))
        recycle_: 1 module
          0  filter 1 drawn anew; filter 4 merged into 3 and drawn anew
        >>> torch.allclose(model(x), before), bool(model[0].weight[1].any())
        (True, True)

    References: G. Sokar, R. Agarwal, P. S. Castro, U. Evci, "The dormant neuron phenomenon in deep reinforcement
        learning", ICML 2023, arXiv 2302.12902, section 4 (ReDo: new incoming weights, outgoing weights 0).
    Differs: filters are judged by their weights instead of their activations on a batch; constants move to biases, so
        that the function stays; duplicates are merged before.
    """
    if not 0 <= weak < 1:
        raise InvalidArgumentError("recycle_ takes 0 <= weak < 1", f"{weak}", "Use for example 1e-3.")
    found = select(model, where, verb="recycle_", can_act=can_act)
    refuse_shards(model, "recycle_")
    refuse_meta(model, "recycle_")
    same = SameFunction(model, example)
    evaluation, training = (trace(model, training=mode, dims=same.dims) for mode in (False, True))
    readers, others = output_channels(evaluation), output_channels(training)
    order = {path: place for place, path in enumerate(readers)}
    paths = {id(site.module): site.path for site in sites(evaluation.model)}
    stay: dict[str, str] = {}
    with Edit(model, "recycle_") as edit, torch.no_grad():
        values = _Values()
        made: list[_Recycled] = []
        for site in sorted(found, key=lambda site: order.get(paths.get(id(site.module), ""), len(order))):
            path = paths.get(id(site.module), site.path)
            faults = _faults(site.module, values, weak)
            if not faults:
                continue
            why: str = evaluation.reason and say(
                "the model cannot be traced ({reason})", reason=fixed(evaluation.reason)
            )
            around = next((each for each in evaluation.call_counts if path.startswith(f"{each}.")), "")
            why = why or _why_not(readers.get(path), others.get(path), around)
            done = _Recycled(readers[path], faults, values) if not why else None
            for reason, filters in ({why: faults.all} if done is None else done.stay).items():
                stay[f"{site.path} {listing([str(i) for i in filters], limit=3)}".strip()] = reason
            if done is not None and done.filters:
                done.draw_(generator(seed, "recycle", site.path))
                made.append(done)
                edit.changed(site.path, done.said)
        _store_(edit, values, made, same)
        if stay and not made:
            listed = list(stay.items())[:3]
            why = joined([say("filters {which}: {reason}", which=which, reason=fixed(r)) for which, r in listed], "; ")
            raise NotApplicableError(
                "recycle_", "", why, "Leave these filters as they are.", action="recycle filters of"
            )
        for which, reason in stay.items():
            edit.note(say("filters {which} stay: {reason}", which=which, reason=fixed(reason)))
        edit.note_stays(left_out(model, where, can_act=can_act))
        if not made:
            nothing = [say("no filter is 0 or proportional to another one")]
            edit.note(joined([*nothing, *([say("or below {weak:g} of the median", weak=weak)] if weak else [])]))
        same.check_(edit, "recycle filters of", *((SAME_OUTPUTS, 0.05) if not weak else ({}, float("inf"))))
    return edit.done()


def can_act(module: nn.Module) -> str | None:
    """Why :func:`recycle_` cannot act on a layer; None if it can.

    Example:
        >>> from gonio.surgery.recycle import can_act
        >>> can_act(nn.Linear(4, 4)), can_act(nn.ReLU())
        (None, 'it has no weight matrix of its own')
    """
    weight = module._parameters.get("weight")
    if weight is None or not isinstance(module, WEIGHTED):
        return say("it has no weight matrix of its own")
    if (why := why_not_dense(weight)) is not None:
        return why
    if weight.is_meta:
        return say("its weight is on the meta device")
    if isinstance(module, nn.Bilinear) or not computes_plainly(module):
        return say("it does not compute what torch's layer computes")
    return None


def _why_not(evaluation: OutputChannels | None, training: OutputChannels | None, around: str) -> str:
    """Why the layers that read a layer's channels are not known; empty if they are."""
    if evaluation is None and around:
        return say("it is inside {around}, which the graph shows as one layer", around=around)
    if evaluation is None:
        return say("the layer does not run")
    if evaluation.why:
        return evaluation.why
    read = [
        {r.path for r in each.readings} if each is not None and not each.why else set()
        for each in (evaluation, training)
    ]
    return "" if read[0] == read[1] else say("its output is used differently in training and in evaluation")


class _Values:
    """The values of parameters in float64 while they are changed, stored in the end."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        self.changed: set[int] = set()

    def peek(self, parameter: Tensor) -> Tensor:
        """The value as it is now, without a copy of a parameter that nothing concerns."""
        return self._values[id(parameter)][1] if id(parameter) in self._values else parameter.detach()

    def read(self, parameter: Tensor) -> Tensor:
        if id(parameter) not in self._values:
            self._values[id(parameter)] = (parameter, parameter.detach().double().clone())
        return self._values[id(parameter)][1]

    def write(self, parameter: Tensor) -> Tensor:
        """The value, to be changed in place."""
        value = self.read(parameter)
        self.changed.add(id(parameter))
        return value

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([self._values[key] for key in self._values if key in self.changed])


@dataclass(frozen=True)
class _Faults:
    """Dead filters, and pairs of a filter, its duplicate and the factor between them; counted over all groups."""

    dead: tuple[int, ...]
    pairs: tuple[tuple[int, int, float], ...]

    def __bool__(self) -> bool:
        return bool(self.dead or self.pairs)

    @property
    def all(self) -> list[int]:
        return sorted({*self.dead, *(copy for _, copy, _ in self.pairs)})


def _tolerance(module: nn.Module) -> float:
    """The relative deviation up to which values of a layer count as equal."""
    return float(min(8 * torch.finfo(module.weight.dtype).eps, 1e-6))  # type: ignore[arg-type]


def _faults(module: nn.Module, values: _Values, weak: float) -> _Faults:
    rows = matrix_view(values.peek(module.get_parameter("weight")), layout_of(module))
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).flatten()
    live = norms[norms > 0]
    if not bool(torch.isfinite(norms).all()) or not len(live):
        return _Faults((), ())
    dead = set(((norms == 0) | (norms < weak * live.median())).nonzero().flatten().tolist())
    pairs, taken, size = [], set(dead), rows.shape[1]
    for group, matrix in enumerate(rows.cpu()):
        total = size * (size - 1) // 2
        if expected_pairs_above(1 - ROUNDING, total, matrix.shape[1]) > _EXPECTED:
            continue
        for first, second in near_duplicates(matrix, cosine=1 - ROUNDING).pairs.tolist():
            i, j = first + group * size, second + group * size
            kept, copied = matrix[first].double(), matrix[second].double()
            factor = float(kept @ copied / kept.square().sum())
            left = float((copied - factor * kept).norm() / copied.norm())
            if not {i, j} & taken and left <= _tolerance(module):
                pairs.append((i, j, factor))
                taken.add(j)
    return _Faults(tuple(sorted(dead)), tuple(pairs))


class _Recycled:
    """The filters of one layer whose outgoing weights are set to 0, and those that stay, by reason."""

    def __init__(self, channels: OutputChannels, faults: _Faults, values: _Values) -> None:
        self.channels, self.values = channels, values
        self.stay: dict[str, list[int]] = {}
        self.dead: list[int] = []
        self.merged: list[tuple[int, int]] = []
        rows = self._rows()
        bias = channels.module._parameters.get("bias")
        self.bias = rows.new_zeros(len(rows), device="cpu") if bias is None else values.read(bias).cpu()
        self.others = [row for row in range(len(rows)) if row not in faults.all]
        if not self.others:
            self.stay[say("no other filter is left to take the norm from")] = faults.all
            return
        for j in faults.dead:
            self._silence_(j)
        for i, j, factor in faults.pairs:
            self._merge_(i, j, factor)

    @property
    def filters(self) -> list[int]:
        """The filters that are drawn anew."""
        return [*self.dead, *(j for _, j in self.merged)]

    @property
    def norms(self) -> list[nn.Module]:
        """The batch norms that the channels pass."""
        found = [op.norm for reading in self.channels.readings for op in reading.operations if op.norm is not None]
        return list(dict.fromkeys(found))

    def _rows(self) -> Tensor:
        """The layer's filters, those of all groups."""
        module = self.channels.module
        return matrix_view(self.values.read(module.get_parameter("weight")), layout_of(module)).flatten(0, 1)

    def _silence_(self, j: int) -> None:
        """Move the constant output of a dead filter to biases, and set its outgoing weights to 0."""
        constants = [_constant(reading, self.bias, j) for reading in self.channels.readings]
        for reading, constant in zip(self.channels.readings, constants, strict=True):
            weight = self.values.read(reading.module.get_parameter("weight"))
            if why := _why_needed(reading, _Columns(weight, reading, j), constant):
                self.stay.setdefault(why, []).append(j)
                return
        for reading, constant in zip(self.channels.readings, constants, strict=True):
            columns = _Columns(self.values.write(reading.module.get_parameter("weight")), reading, j)
            if constant and bool(columns.own.any()):
                bias = self.values.write(reading.module.get_parameter("bias"))
                bias[columns.rows] += constant * columns.own.flatten(1).sum(1)
            columns.own.zero_()
        self.dead.append(j)

    def _merge_(self, i: int, j: int, factor: float) -> None:
        """Add the outgoing weights of filter j to those of filter i, and set them to 0."""
        changes = []
        for reading in self.channels.readings:
            weight = self.values.read(reading.module.get_parameter("weight"))
            kept, gone = (_Columns(weight, reading, channel) for channel in (i, j))
            times = self._factor(reading, i, j, factor)
            if times is None:
                why = say("behind the layers that follow, its output is no multiple of that of filter {i}", i=i)
                self.stay.setdefault(why, []).append(j)
                return
            if kept.rows != gone.rows:
                why = say("{path} reads it in another group than filter {i}", path=reading.path, i=i)
                self.stay.setdefault(why, []).append(j)
                return
            changes.append((reading, kept.own, gone.own, times))
        for reading, kept_own, gone_own, times in changes:
            self.values.write(reading.module.get_parameter("weight"))
            kept_own += times * gone_own
            gone_own.zero_()
        self.merged.append((i, j))

    def _factor(self, reading: Reading, i: int, j: int, factor: float) -> float | None:
        """c, if behind the operations channel j is c times channel i; None if it is no multiple."""
        tolerance = _tolerance(self.channels.module)
        terms = float(self.bias[j]), factor * float(self.bias[i])
        offset, size = terms[0] - terms[1], max(map(abs, terms))
        for op in reading.operations:
            if op.norm is not None:
                (s_i, s_j), (t_i, t_j) = (each[[i, j]].tolist() for each in (op.scale, op.shift))
                if s_i == 0 or s_j == 0:
                    return None
                factor *= s_j / s_i
                terms = t_j, factor * t_i
                offset, size = s_j * offset + terms[0] - terms[1], max(abs(s_j) * size, *map(abs, terms))
                continue
            fits = op.linear or (op.homogeneous and factor > 0) or abs(factor - 1) <= tolerance
            if not (fits and op.alike and abs(offset) <= tolerance * size):
                return None
            offset = size = 0.0
        return factor if abs(offset) <= tolerance * size else None

    def draw_(self, random: torch.Generator) -> None:
        """Random directions with the median norm of the other filters; bias 0."""
        module = self.channels.module
        weight, rows = self.values.write(module.get_parameter("weight")), self._rows().clone()
        norm = rows[self.others].norm(dim=1).median()
        directions = torch.randn(
            len(self.filters), rows.shape[1], generator=random, dtype=torch.float64, device="cpu"
        ).to(rows)
        rows[self.filters] = norm * directions / directions.norm(dim=1, keepdim=True)
        layout = layout_of(module)
        weight.copy_(unview(rows.unflatten(0, (layout.matrices, -1)), weight.shape, layout))
        if (bias := module._parameters.get("bias")) is not None:
            self.values.write(bias)[self.filters] = 0

    @property
    def said(self) -> Message:
        """What was done, filter by filter."""
        dead = {"s": "s" * (len(self.dead) > 1), "listed": listing([*map(str, self.dead)], limit=5)}
        drawn = [say("filter{s} {listed} drawn anew", **dead)] if self.dead else []
        merged = [say("filter {j} merged into {i} and drawn anew", i=i, j=j) for i, j in self.merged[:5]]
        more = [say("{n} more merged", n=len(self.merged) - 5)] if len(self.merged) > 5 else []
        return joined([*drawn, *merged, *more], "; ")


class _Columns:
    """The weights with which a layer reads one channel.

    Attributes:
        own: these weights, one row per filter that reads the channel; a view. `rows`: the numbers of these filters.
        block: all weights of these filters.
    """

    def __init__(self, weight: Tensor, reading: Reading, channel: int) -> None:
        module: Any = reading.module
        if isinstance(module, nn.Linear):
            first = channel * reading.per_channel
            self.block, self.rows = weight, slice(0, len(weight))
            self.own = weight[:, first : first + reading.per_channel]
            return
        inputs = module.in_channels // module.groups
        group, place = divmod(channel, inputs)
        outputs = module.out_channels // module.groups
        self.rows = slice(group * outputs, (group + 1) * outputs)
        transposed = module.transposed
        inner = weight[group * inputs : (group + 1) * inputs].transpose(0, 1) if transposed else weight[self.rows]
        self.block, self.own = inner, inner[:, place : place + 1]


def _constant(reading: Reading, bias: Tensor, j: int) -> float:
    """What a layer reads of a channel that is its bias; NaN if that is not the same everywhere."""
    values = bias
    for op in reading.operations:
        before, values = values, op.function(values)
        if not op.keeps_constants and float(before[j]) != 0:
            return float("nan")
    return float(values[j])


def _why_needed(reading: Reading, columns: _Columns, constant: float) -> str:
    """Why a layer cannot do without a channel that is constant; empty if it can."""
    module: Any = reading.module
    entries = [each.flatten(1).count_nonzero(1) for each in (columns.own, columns.block)]
    if bool(((entries[0] == entries[1]) & (entries[0] > 0)).any()):
        return say("without it, filters of {path} have no weight left", path=reading.path)
    if constant == 0 or not bool(columns.own.any()):
        return ""
    if not isfinite(constant):
        return say("its constant output is not the same everywhere at the input of {path}", path=reading.path)
    told = {"constant": constant, "path": reading.path}
    if module.bias is None:
        return say("its output is the constant {constant:.3g}, and {path} has no bias for it", **told)
    if isinstance(module, nn.Linear):
        return ""
    padded = module.padding == "same" or (module.padding != "valid" and any(module.padding))
    edge = module.transposed or (padded and module.padding_mode == "zeros")
    if not edge:
        return ""
    return say(
        "its output is the constant {constant:.3g}, which is cut off at the edges of the input of {path}", **told
    )


def _store_(edit: Edit, values: _Values, made: list[_Recycled], same: SameFunction) -> None:
    """Write the weights, and start the batch norms of new filters anew."""
    for parameter, value in values:
        edit.set_data_(parameter, value.to(parameter.dtype))
    for recycled in made:
        for norm in recycled.norms:
            state = {**norm._parameters, **norm._buffers}
            for name, start in _STARTS.items():
                tensor = state.get(name)
                if tensor is not None:
                    _set_entries_(
                        edit,
                        norm,
                        name,
                        recycled.filters,
                        torch.full((len(recycled.filters),), start, device="cpu", dtype=torch.float32),
                    )
    if any(recycled.norms for recycled in made):
        _measure_(edit, made, same)


def _set_entries_(edit: Edit, module: nn.Module, name: str, places: list[int], values: Tensor) -> None:
    tensor: Tensor = getattr(module, name)
    new = tensor.detach().clone()
    new[places] = values.to(new)
    if name in module._buffers:
        edit.set_buffer_(module, name, new)
    else:
        edit.set_data_(tensor, new)


def _measure_(edit: Edit, made: list[_Recycled], same: SameFunction) -> None:
    """Statistics of the new filters on an input, if the caller gave one."""
    if same.example is None:
        what = say("batch norms take the mean 0 and the variance 1 for new filters: pass example=, or use calibrate_")
        edit.note(what)
        return
    paths = {id(site.module): site.path for site in sites(edit.model)}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def record(path: str, _module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x = first_input(arguments, keywords).detach().double().transpose(0, 1).flatten(1)
        seen[path] = x.mean(1), x.var(1, correction=int(x.shape[1] > 1))

    with evaluating(edit.model) as plain, ExitStack() as hooks:
        modules = modules_at(plain)
        for path in {paths[id(norm)] for recycled in made for norm in recycled.norms}:
            hooks.enter_context(modules[path].register_forward_pre_hook(partial(record, path), with_kwargs=True))
        call(plain, same.example)
    for recycled in made:
        for norm in recycled.norms:
            for name, value in zip(("running_mean", "running_var"), seen[paths[id(norm)]], strict=True):
                _set_entries_(edit, norm, name, recycled.filters, value[recycled.filters])
