"""`Tracker`: the figures of `measure` during training, as scalars for a logger."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Literal, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gonio.editing.edit import referrer
from gonio.editing.steps import differ, sum_of, watch
from gonio.editing.where import asked_of, modules_at, require_model
from gonio.editing.wrappers import parameter_ids
from gonio.errors import GonioWarning, InvalidArgumentError, NoMatchError, listing
from gonio.execution import is_sharded, several_ranks
from gonio.measuring.figures.attention import HeadLogits
from gonio.measuring.figures.structure import Outside
from gonio.measuring.figures.tensor import TRACKED, TensorMeasurement, measure_tensor
from gonio.measuring.findings.model_rules import findings_of
from gonio.measuring.findings.rules import Finding, findings_by
from gonio.measuring.findings.state_rules import OUTSIDE_RULES, STATE_RULES, STEP_RULES
from gonio.measuring.reading.entry import TensorEntry, dtype_name
from gonio.measuring.reading.model import entries_of_model
from gonio.measuring.showing.table import frame_from
from gonio.measuring.showing.training import SECONDS, LivePage, checked_page, training_page
from gonio.measuring.training.advice import LayerRotation, layer_rotations
from gonio.measuring.training.attention import ATTENTION, AttentionFigures, attention_rows
from gonio.measuring.training.loggers import (
    Histogram,
    SendHistograms,
    histogram_sender_of,
    histograms_of,
    sender_of,
)
from gonio.measuring.training.shards import SHARDED, ShardSums, divided, local, norms_of_shards
from gonio.measuring.training.steps import TRAINING, Also, StepFigures, check_also, checked_optimizers, of_several
from gonio.messages import say
from gonio.surgery import Where, as_selector, sites

EVERY, PAUSE = 100, 1.0  # steps, and seconds with a page, from one measurement to the next
SEVERAL = "several optimizers step parameters of its weight, and a row has the step of one of them alone"
OUTSIDE = "no optimizer that was given steps its parameters"
FIGURES = ("nonfinite", *TRACKED)  # the columns of a CSV file, in this order


class Tracker:
    r"""Norms, angles and spectra of a model's weights at an interval of its training, as scalars for any logger.

    The same figures as :func:`gonio.measure`, of every weight that has filters. Training is not affected: no random
    number, gradient, mode or buffer of the model changes, so the trained weights are bit-equal. Each measurement
    costs one :func:`gonio.measure` without a batch, whatever the batch size; `where` makes it cheaper.

    With an optimizer, each measured step is also seen as a rotation (:func:`gonio.measuring.step_rotation`):
    the weights are copied before the optimizer's step and compared after it, with everything that hooks of it
    (:func:`gonio.hold_`) and wrappers around it (Lookahead, SAM) do. Rows gain

    ======================  ================================================================================
    rotation                angle in radians by which the step turned the weight
    predicted_rotation      at which the optimizer's settings hold it in the long run, if it is scale-invariant
                            (:func:`gonio.measuring.equilibrium`); absent without weight decay
    relative_update         norm of the change over the norm of the weight
    radial_share            share of the squared change along the weight; 1/d for a random direction
    effective_rate          η/‖w‖² of a weight before a normalisation layer, read from the traced model
    learning_rate           η of the weight's group
    initial_angle           angle in degrees to the weight before the first measured step, on request
    filter_rotation_…       min, median and max over filters, on request
    gradient_norm           of the gradient with which the optimizer steps, on request
    gradient_rms            of the optimizer's second moment, the square root of its mean without bias, on request
    update_rms              of the update in units of the learning rate, by the optimizer's state, on request
    ======================  ================================================================================

    With `also=("attention",)` each attention has a row, from the forwards in training mode since the step before: the
    `largest_logit` of its heads, their mean `entropy` in nats, the smallest `entropy_share` of a head (1 for equal
    probabilities), and `one_token_heads`, how many attend to one token (see :func:`gonio.measure`). Of several
    processes, it is that of the first one's batch. Hooks are there before the steps that are recorded only.

    Args:
        model: wrapped or not; layers swapped later are measured too.
        to: loggers. A logger is recognised by the first method that it has of `add_scalar(tag, value, step)`
            (TensorBoard), `log_metrics(dict, step=)` (Lightning's loggers, MLflow), `log_metric(tag, value, step=)`
            and `log(dict, step=)` (W&B). Or the path of a CSV file, to which lines are appended, or a function of the
            step and the figures of each layer. Tags are `gonio.FIGURE/LAYER`.
        optimizer: one, wrapped or not, or a list; its steps are counted, so :meth:`step` need not be called. A step
            that a gradient scaler skips has no row, and neither has one that changes nothing.
        every: number of steps from one measurement to the next. None for 100; with a `page` and one process steps
            within a second of the last measured one are left out, because they would slow fast trainings by over 3 %.
        where: the layers to measure; all by default.
        also: figures that take more time or memory: "filter_rotation"; "initial_angle", for which a copy of the weights
            stays in the memory of the CPU; "gradient", its norm; "state", the figures of the optimizer's state, with
            the rules of :func:`gonio.check` on them; "attention", for which the model runs once at the start.
        example: for "attention", an input as :func:`gonio.surgery.anatomy` takes it; None for a generated one.
        figures: "all", or with an optimizer only those of the "training": without angles and spectra, a measurement is
            cheap enough for every step.
        page: the path of a page (`.html`), with an optimizer: it is written anew while the network trains, at most
            every 10 seconds and for at most 2 % of the time, and a browser loads it anew by itself. :meth:`undo_`
            writes it a last time.
        copies: with an optimizer, "all" copies all measured weights for a measured step; "one" copies one weight, so
            that it needs the memory of one, and each measured step has the row of one layer in turn.

        histograms: send, beside the scalars, the norms of the filters and the angles between them as a histogram of
            each layer, `gonio.norms/LAYER` and `gonio.angles/LAYER`, to the loggers that take one: those with
            `add_histogram_raw` (TensorBoard) and runs of W&B.
        gather: of weights that FSDP2 or tensor parallelism divides, gather one at a time in every process, for the
            figures of angles and spectra, and histograms. By default no weight is gathered.

    Attributes:
        rows: a dict with `step`, `layer` and the figures, for each measured step and layer. A figure that does not
            apply is absent: a depthwise convolution has no angles.
        heads: for "attention", each recorded step with what each head attends to.
        left_out: of each divided weight, why figures are absent; of one with parameters in several optimizers, that
            figures of steps are those of one of them; of one that trains, but not by the given optimizers, that it has
            no row. Empty without one.
        findings: what the rules of :func:`gonio.measure` found in single weights, such as filters that collapse onto
            one direction, each with the step at which it was first seen; with `figures="training"` only weights that
            are not finite, whose rows then have `nonfinite`. For "attention", also what they found in heads. With an
            optimizer also steps that are large beside the weight (G805), weights that no step turns (G807), and
            parameters that no optimizer has (G418, at step 0).

    Raises:
        InvalidArgumentError: if `every` is not positive, or for an object that is not a logger or not an optimizer of
            the model, for a page that cannot be written, and for `histograms` without a logger that takes them.
        NoMatchError: if `where` selects no layer that has filters; for "attention", if none can be observed, with the
            reasons.
        NotApplicableError: for "attention" of a model with sharded parameters.

    Note:
        With several processes, call it in all of them. Of weights that are divided (FSDP2's `fully_shard`,
        `parallelize_module`), norms, zero filters, figures of steps, gradients and the optimizer's state are sums over
        shards: each process sums its own, and one reduction of 8 bytes per filter adds those of all weights. Only the
        first one logs and stores rows.

    Example:
        >>> model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> tracker = gonio.Tracker(model, every=2)
        >>> turned = gonio.Tracker(model, optimizer=optimizer, every=2)
        >>> for _ in range(4):
        ...     loss = model(torch.randn(8, 20)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     tracker.step()
        >>> [(row["step"], row["layer"]) for row in tracker.rows]
        [(2, '0'), (2, '2'), (4, '0'), (4, '2')]
        >>> tracker.rows[-1]["alignment"] == gonio.measure(model)["2"].alignment
        True
        >>> [(row["step"], row["layer"], row["rotation"] > 0) for row in turned.rows]
        [(2, '0', True), (2, '2', True), (4, '0', True), (4, '2', True)]
        >>> turned.undo_()
    """

    def __init__(
        self,
        model: nn.Module,
        to: Any = (),
        *,
        optimizer: Optimizer | list[Optimizer] | None = None,
        every: int | None = None,
        where: Where = None,
        also: Also = (),
        figures: Literal["all", "training"] = "all",
        copies: Literal["all", "one"] = "all",
        example: Any = None,
        page: str | os.PathLike[str] | None = None,
        histograms: bool = False,
        gather: bool = False,
    ) -> None:
        require_model(model, "Tracker")
        pause = PAUSE if every is None and page is not None and not several_ranks() else 0.0
        every = EVERY if every is None else every
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InvalidArgumentError("Tracker(every=) is a number of steps", repr(every), "Pass 1 or more.")
        _check_choices(figures, copies, also, optimizer)
        self._live = None if page is None else LivePage(checked_page(page, optimizer))
        self._model, self._every, self._selector = model, every, as_selector(where)
        self._check_selects()
        watched, optimizers = ([], []) if optimizer is None else checked_optimizers(model, optimizer)
        self._attention = AttentionFigures(model, example) if "attention" in also else None
        self._figures = FIGURES if optimizer is None else TRAINING if figures == "training" else (*FIGURES, *TRAINING)
        self._figures += ATTENTION if self._attention is not None else ()
        loggers = to if isinstance(to, (list, tuple)) else [to]
        self._senders = [sender_of(logger, self._figures) for logger in loggers] if _first() else []
        self._histograms: dict[str, Histogram] | None = {} if histograms else None
        self._drawers = _drawers(loggers, figures) if histograms else []
        self._step = self._measured = self._turn = 0
        self._stride = 1
        self._one, self._only_training = copies == "one", figures == "training"
        self.rows: list[dict[str, Any]] = []
        self.heads: list[tuple[int, HeadLogits]] = []
        self.findings: list[tuple[int, Finding]] = []
        self.training = StepFigures(model, also) if optimizers else None
        self._counts = dict.fromkeys(map(id, optimizers), 0)
        self._skipped: dict[int, int | Tensor] = dict.fromkeys(self._counts, 0)  # of these counts, not yet taken off
        self._pause, self._began = pause, dict.fromkeys(self._counts, -inf)
        self._last_hooks: dict[int, Callable[[], None]] = {}  # by which gradients are read: how they are removed
        self._unread = set[int]()  # whose gradients are to be read in this step
        self._due, self._open = set[int](), set[int]()  # whose step is measured; whose step has begun
        self._failed, self._gather = False, gather
        self._lacking: set[int] = set()  # loggers whose first error was reported
        self.left_out: dict[str, str] = {}
        self._name_several(optimizers)
        self._name_outside(optimizers)
        self._ends: list[Callable[[], None]] = []
        self._optimizers = [type(each).__name__ for each in optimizers]
        refer = referrer(model)
        plain = [p for p in model.parameters() if p.is_floating_point() and (type(p) is nn.Parameter or is_sharded(p))]
        self._sums = [(refer(p), sum_of(p)) for p in plain if p.layout == torch.strided] if optimizers else []
        self._watch(watched)
        if self._attention is not None:
            weakref.finalize(self, self._attention.end_).atexit = False
            self._expect()

    def _watch(self, watched: Sequence[Any]) -> None:
        """Observe the steps of the optimizers."""
        # not to be compiled with the step: measuring is hundreds of graphs (optimizers have imported the compiler)
        act = torch.compiler.disable(_shielded) if watched else _shielded
        shielded = partial(partial, act, weakref.ref(self))
        whole = shielded(Tracker._begin), shielded(Tracker._end)
        for each in watched:
            before = shielded(Tracker._before)
            self._ends.append(watch(each, before=before, whole=whole, measures=True, verb="Tracker()"))
            weakref.finalize(self, self._ends[-1]).atexit = False

    def _name_several(self, optimizers: Sequence[Optimizer]) -> None:
        """Warn of weights that several optimizers step in part."""
        if len(optimizers) > 1 and (several := of_several(self._entries(), optimizers)):
            self.left_out |= dict.fromkeys(several, SEVERAL)
            text = f"Tracker: {listing(several, limit=4)}: {SEVERAL}. Give all parameters of a layer to one optimizer."
            warnings.warn(text, GonioWarning, stacklevel=3)

    def _name_outside(self, optimizers: Sequence[Optimizer]) -> None:
        """Name weights that no optimizer steps; it is a finding where the optimizers have what the model has not."""
        if self.training is None:
            return
        found = findings_by(OUTSIDE_RULES, [(Outside.of(self._model, optimizers), "")])
        self._keep(one for one in found if one.level != "info")
        held = set[int]().union(*map(parameter_ids, optimizers))
        self.left_out |= dict.fromkeys(self.training.without_optimizer(self._entries(), held), OUTSIDE)

    def _check_selects(self) -> None:
        """Raise if `where` selects no weight that is measured."""
        if not self._entries():
            found = [entry for entry in entries_of_model(self._model) if entry.layout is not None]
            left = self._left_out(found)
            paths = [entry.path[:80] for entry in found if entry.name not in left]
            reasons = {entry.path[:80]: left[entry.name] for entry in found if entry.name in left}
            raise NoMatchError("Tracker", asked_of(self._selector), paths, refused=reasons)

    def __repr__(self) -> str:
        found = f", {len(self.findings)} findings" if self.findings else ""
        return f"<Tracker every {self._every} steps: {len(self.rows)} rows, {len(self._senders)} loggers{found}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: a copy would record nothing, and its :meth:`undo_` would end this one."""
        do = "Keep rows, heads and findings; make a new Tracker for a copied model or in another process."
        raise InvalidArgumentError("a Tracker observes one model in one process", "a copy or a pickle of it", do)

    def step(self, number: int | None = None) -> None:
        """Count one step of the optimizer, and measure at every `every`-th one.

        A tracker that was given the optimizer counts by itself; then only a number has an effect, on later steps.

        Args:
            number: of the step, if it is counted elsewhere; with several optimizers it has no effect. Where numbers
                leave out a multiple of `every`, the next one is measured. A number that was measured before is not
                measured again.
        """
        if self.training is not None:
            if number is not None and len(self._counts) == 1:
                self._counts = dict.fromkeys(self._counts, number)
            return
        before = self._step
        self._step = before + 1 if number is None else number
        self._stride = max(1, self._step - before) if before else 1  # a trainer may count several optimizers
        passed = self._step // self._every > before // self._every if before else self._step % self._every == 0
        if passed and self._step != self._measured:
            self.measure()
        self._expect()

    def measure(self) -> None:
        """Measure now, for example before the first step; without figures of a step."""
        self._measured = self._step
        found = self._measure(self._entries())
        self._record(self._step, self._with_attention(found))

    def _expect(self) -> None:
        """Observe attention if the next step is recorded."""
        if self._attention is not None:
            steps = self._counts.values() if self.training is not None else [self._step]
            if any((step + self._stride) // self._every > step // self._every for step in steps):
                self._attention.begin_()

    def _with_attention(self, found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        """The rows of weights and those of attention; what the rules find in heads is kept."""
        heads = () if self._attention is None else self._attention.take()
        if _first():
            self.heads += [(self._step, head) for head in heads]
        self._keep(findings_of((), None, heads))
        rows = attention_rows(heads)
        return found | {path: found.get(path, {}) | row for path, row in rows.items()}

    def _keep(self, findings: Iterable[Finding]) -> None:
        """Keep what was not found before."""
        if _first():
            known = {(one.code, one.path) for _, one in self.findings}
            self.findings += [(self._step, one) for one in findings if (one.code, one.path) not in known]

    def _measure(self, entries: Sequence[TensorEntry]) -> dict[str, dict[str, float]]:
        """The figures of weights; what the rules find in them is kept if it is new."""
        rows: list[TensorMeasurement | Callable[[], TensorMeasurement]] = []
        sums = ShardSums()
        for entry in entries:
            weight = None if self._gather else _weight_of(entry)
            if divided(weight):
                rows.append(norms_of_shards(entry, weight, sums))
                self.left_out[entry.path] = SHARDED
            else:
                whole = measure_tensor(entry if weight is None else replace(entry, load=partial(local, weight)))
                rows.append(whole)
                if self._histograms is not None:
                    self._histograms |= histograms_of(entry, whole)
        sums.reduce()
        measured = [row if isinstance(row, TensorMeasurement) else row() for row in rows]
        # rules on single weights say much of a network that has not learnt yet
        self._keep(one for one in findings_of(measured) if one.level != "info")
        return {row.path: _figures(row) for row in measured}

    def undo_(self) -> None:
        """Remove the hooks by which steps of the optimizer are measured; rows stay. Warns if nothing was recorded."""
        for end in (*self._ends, *self._last_hooks.values()):
            end()
        if self._attention is not None:
            self._attention.end_()
        if self._live is not None and _first() and self._has_steps:
            self._live.write(self._page(whole=True))
        self.warn_if_empty()

    def warn_if_empty(self) -> None:
        """Warn if nothing was recorded, and say why; :meth:`undo_` and callbacks do so at the end of a training."""
        if not self.rows and _first() and not self._failed:
            self._failed = True  # once
            warnings.warn(f"Tracker: nothing was recorded: {self._why_empty()}", GonioWarning, stacklevel=3)

    def _why_empty(self) -> str:
        """Why there is no row, by what was observed."""
        if self.training is None:
            if not self._step:
                return "step() was not called. Call it after each step of the optimizer, or pass optimizer=."
            return f"{self._step} steps were counted, and every={self._every}. Lower every=, or call measure()."
        name = " and ".join(self._optimizers)
        steps = max((count - (key in self._open) for key, count in self._counts.items()), default=0)
        changed = any((p := ref()) is not None and differ(was, sum_of(p)) for ref, was in self._sums)
        if not steps and not changed:
            return f"the {name} made no step, and no weight of the model has changed."
        if not steps:
            return (
                f"no step of the {name} was observed, although weights of the model have changed. "
                "Pass the optimizer whose step() trains the model."
            )
        if steps < self._every:
            return f"the {name} made {steps} steps, and every={self._every}. Pass a smaller every=."
        if changed and self._every == 1:
            return (
                f"no step of the {name} changed a weight, although weights of the model have changed: something else "
                "trains them, such as hooks in the backward pass or a trainer that keeps copies of the weights. "
                "Leave optimizer= out, and call step() after each step."
            )
        return f"no measured step of the {name} changed a weight, as when a gradient scaler skips it."

    @property
    def rotations(self) -> list[LayerRotation]:
        """Of each layer: its rotation beside the prediction, and the reason where they differ."""
        invariant = None if self.training is None else self.training.invariant
        return layer_rotations(self.rows, invariant, {} if self.training is None else self.training.predictions)

    def to_html(self) -> str:
        """The page "how this training turned": one self-contained page that loads nothing.

        Raises:
            InvalidArgumentError: without measured steps.
        """
        return self._page(whole=True)

    @property
    def _has_steps(self) -> bool:
        """Whether a page can show something."""
        return any("rotation" in row for row in self.rows)

    def _repr_html_(self) -> str | None:
        return self._page(whole=False) if self._has_steps else None

    def _page(self, *, whole: bool, refresh: int = 0) -> str:
        if not self._has_steps:
            do = "Pass optimizer=, and train for a measured step."
            do = do if self.rows or self.training is None else f"Nothing was recorded: {self._why_empty()}"
            raise InvalidArgumentError("Tracker.to_html() shows steps of an optimizer", "no row of one", do)
        found = [
            say(
                "From step {step} on, {path}: {found} ({code}). {do}",
                step=step,
                path=one.path,
                found=one.found,
                code=one.code,
                do=one.do,
            )
            for step, one in self.findings
        ]
        return training_page(self.rows, self.rotations, found, whole=whole, refresh=refresh)

    def _multiple(self, optimizer: Optimizer) -> bool:
        """Count a step, and whether it is an `every`-th one, without those that a scaler lets a fused optimizer skip.

        Whether it is skipped is known on the device alone, so that it is read only where it matters.
        """
        key, overflow = id(optimizer), getattr(optimizer, "found_inf", None)  # set by torch's scaler around the step
        self._counts[key] += 1
        if overflow is not None:
            self._skipped[key] = self._skipped[key] + (overflow > 0).long()
        if self._counts[key] % self._every:
            return False
        skipped, self._skipped[key] = int(self._skipped[key]), 0
        self._counts[key] -= skipped
        return not self._counts[key] % self._every and not (skipped and overflow is not None and bool(overflow))

    def _begin(self, optimizer: Optimizer) -> None:
        key, now = id(optimizer), time.monotonic() if self._pause else 0.0
        self._counts[key] -= key in self._open  # a wrapper called no step of it, or its step ended by an exception
        self._open.add(key)
        due = self._multiple(optimizer) and now - self._began[key] >= self._pause
        (self._due.add if due else self._due.discard)(key)
        if self.training is not None and due:
            self._began[key] = now
            entries = self._entries()
            if self._one:
                entries = [entries[self._turn % len(entries)]]
                self._turn += 1
            self.training.copy(entries, optimizer)

    def _before(self, optimizer: Optimizer) -> None:
        """Read gradients when the optimizer's own hooks have run, such as one that clips: torch calls them later."""
        if self.training is not None and self.training.reads_gradients and id(optimizer) in self._due:
            self._forget_hook(optimizer)  # of a step that an exception ended
            self._unread.add(id(optimizer))
            act = partial(_shielded, weakref.ref(self), Tracker._keep_gradients)
            self._last_hooks[id(optimizer)] = optimizer.register_step_pre_hook(lambda each, *_: act(each)).remove

    def _keep_gradients(self, optimizer: Optimizer) -> None:
        if self.training is not None and id(optimizer) in self._unread:
            self._unread.discard(id(optimizer))  # a step that calls that of its base class calls hooks twice
            self.training.keep_gradients(optimizer)

    def _forget_hook(self, optimizer: Optimizer) -> None:
        if (remove := self._last_hooks.pop(id(optimizer), None)) is not None:
            remove()

    def _end(self, optimizer: Optimizer) -> None:
        self._open.discard(id(optimizer))
        self._forget_hook(optimizer)
        self._step = self._measured = self._counts[id(optimizer)]
        if self.training is not None and id(optimizer) in self._due:
            taken = self.training.take(optimizer, self._step)
            measured = self._measured_with(taken)
            found = {entry.path: measured.get(entry.path, {}) | figures for entry, figures in taken}
            for path in [path for path in found if self.left_out.get(path) == OUTSIDE]:  # an optimizer has got it since
                del self.left_out[path]
            states = findings_by(STATE_RULES, ((row, row.path) for row in self.training.state_rows()))
            of_steps = findings_by(STEP_RULES, ((facts, facts.path) for facts in self.training.judged.facts))
            self._keep(one for one in (*states, *of_steps) if one.level != "info")
            if found:
                self._record(self._step, self._with_attention(found))
        self._expect()

    def _measured_with(self, taken: Sequence[tuple[TensorEntry, dict[str, float]]]) -> dict[str, dict[str, float]]:
        """The figures of weights beside those of a step; with those of the training only where a weight diverged."""
        if not self._only_training or self.training is None:
            return self._measure([entry for entry, _ in taken])
        diverged = [entry for entry, _ in taken if entry.path in self.training.diverged]
        measured = self._measure(diverged) if diverged else {}
        return {path: {"nonfinite": row["nonfinite"]} for path, row in measured.items() if "nonfinite" in row}

    def _record(self, step: int, found: Mapping[str, dict[str, float]]) -> None:
        if _first():
            self.rows += ({"step": step, "layer": layer, **row} for layer, row in found.items())
            sends: list[Callable[[], object]] = [partial(send, step, found) for send in self._senders]
            sends += [partial(draw, step, dict(self._histograms or {})) for draw in self._drawers]
            if self._live is not None and self._has_steps:
                sends.append(partial(self._live.renew, partial(self._page, whole=True, refresh=SECONDS)))
            for place, send in enumerate(sends):
                self._send(place, send, step)
        if self._histograms is not None:
            self._histograms.clear()

    def _send(self, place: int, send: Callable[[], object], step: int) -> None:
        """Send to a logger; its first error becomes a warning, because it must not end the training."""
        try:
            send()
        except Exception as error:
            if place not in self._lacking:
                self._lacking.add(place)
                text = f"Tracker: a logger or the page lacks step {step}: {type(error).__name__}: {error}. "
                text += "Tracker.rows has it. Further errors of the same logger are not reported."
                warnings.warn(text, GonioWarning, stacklevel=2)

    def to_frame(self) -> Any:
        """The rows as a `pandas.DataFrame`.

        Raises:
            MissingExtraError: without pandas.
        """
        return frame_from(self.rows, ["step", "layer", *self._figures])

    def _entries(self) -> list[TensorEntry]:
        """The weights with filters of the selected layers."""
        modules = modules_at(self._model)
        found = [e for e in entries_of_model(self._model) if e.layout is not None and e.load is not None]
        left = self._left_out(found)
        weights = [entry for entry in found if entry.name not in left]
        owners = [entry.name.rpartition(".")[0] for entry in weights]
        pairs = zip(weights, owners, strict=True)
        return [entry for entry, owner in pairs if self._selector(owner, modules.get(owner, self._model))]

    def _left_out(self, entries: list[TensorEntry]) -> dict[str, str]:
        """The weights whose steps cannot be measured, by name, and why."""
        found = {entry.name: "its weight is complex" for entry in entries if entry.dtype.startswith("complex")}
        for site in sites(self._model):
            for name, tensor in site.module._parameters.items():
                if tensor is not None and str(tensor.layout) != "torch.strided":
                    label = f"{site.path}.{name}" if site.path else name
                    found[label] = f"its weight is stored as {dtype_name(tensor.layout)}"
        return found


def _weight_of(entry: TensorEntry) -> Any:
    """The weight; None for one that cannot be read, of which the measurement says why."""
    try:
        weight = entry.read()
    except Exception:  # the model's own code
        return None
    return weight if isinstance(weight, Tensor) else None


def _shielded(ref: weakref.ref[Tracker], act: Callable[[Tracker, Optimizer], None], optimizer: Optimizer) -> None:
    """Measure a step; an error becomes one warning, because it must not end the training."""
    tracker = ref()
    if tracker is None:
        return
    try:
        act(tracker, optimizer)
    except Exception as error:
        if not tracker._failed:
            tracker._failed = True
            text = f"Tracker: a step could not be measured, and its rows are missing: {type(error).__name__}: {error}"
            warnings.warn(text, GonioWarning, stacklevel=2)


def _check_choices(figures: str, copies: str, also: Also, optimizer: object) -> None:
    for name, value, choices in (("figures", figures, ("all", "training")), ("copies", copies, ("all", "one"))):
        if value not in choices:
            raise InvalidArgumentError(f"Tracker({name}=) is one of {', '.join(choices)}", repr(value), "Choose one.")
    check_also(also)
    if optimizer is None and (figures, copies, set(also) - {"attention"}) != ("all", "all", set()):
        found = f"figures={figures!r}, copies={copies!r}, also={also!r} without one"
        raise InvalidArgumentError("Tracker() measures steps with optimizer=", found, "Pass the optimizer.")


def _drawers(loggers: Sequence[Any], figures: str) -> list[SendHistograms]:
    """The functions that send histograms, to the loggers that take them."""
    found = [send for logger in loggers if (send := histogram_sender_of(logger)) is not None]
    if figures == "training" or not found:
        given = "figures='training'" if figures == "training" else "no logger that takes them"
        do = "Pass a SummaryWriter of TensorBoard or a run of W&B, and figures='all'."
        raise InvalidArgumentError("Tracker(histograms=True) sends norms and angles to a logger", given, do)
    return found


def _first() -> bool:
    return not several_ranks() or dist.get_rank() == 0


def _figures(t: TensorMeasurement) -> dict[str, float]:
    """The figures that apply; only the number of non-finite values for a weight that cannot be read."""
    quantiles = t.norm_quantiles or (None,)
    ends = {"norm_min": quantiles[0], "norm_max": quantiles[-1]}
    values = {name: ends[name] if name in ends else getattr(t, name) for name in FIGURES}
    return {name: float(value) for name, value in values.items() if value is not None}
