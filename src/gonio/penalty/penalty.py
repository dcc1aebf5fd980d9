"""Regularizers bound to a model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gonio.editing.memory import refuse_inference
from gonio.editing.steps import watch
from gonio.editing.where import Where, refuse_flat_shards
from gonio.editing.wrappers import parameter_ids
from gonio.errors import GonioWarning, InvalidArgumentError, listing
from gonio.escaping import html_table
from gonio.execution import ProcessGroup, ordinary_eager
from gonio.penalty.hooks import data_parallel_group
from gonio.penalty.terms import OutputTerm, Term, WeightTerm, bind, terms_of
from gonio.regularizers import Evaluation, OutputRegularizer, Regularizer, WeightRegularizer
from gonio.surgery.blocks import Anatomy

UNCALLED = 10
"""Steps of an optimizer after which a penalty warns that was never called, or whose gradient was never computed."""


class Penalty:
    r"""The sum of regularizers over the layers that their rules choose, to be added to the loss.

    .. math:: \sum_{\text{rules}} \sum_{\text{layers}} \text{strength} \cdot \text{value}

    Call it once per training step, after the forward: ``loss = criterion(model(x), y) + penalty()``.
    Regularizers of outputs read them through forward hooks, which hold them until the call; build the penalty
    before ``torch.compile`` and before the first step. Recomputation under (non-reentrant) checkpointing and evaluation
    are not counted, and a layer that ran several times since the last call contributes the mean over its runs.

    A weight under two rules has two terms. A tensor that several layers share counts once per rule. Frozen weights are
    skipped as long as they are frozen. Regularizers of the scale alone skip weights in front of a normalisation layer.
    ``print(penalty)`` shows all of this.

    A penalty that was not called in the first ten steps of an optimizer of its weights warns once, and so does one that
    no backward pass has reached by then, as of ``penalty().item()`` in the loss or of a call under ``torch.no_grad()``.

    Under ``torch.amp.GradScaler`` the penalty is scaled with the loss that it is part of. Under gradient
    accumulation either divide the whole loss, penalty included, by the number of micro-batches (schedules and
    `every` then count these), or divide only the loss and set ``accumulate=``.

    Args:
        model: not changed, but for forward hooks on the layers whose outputs are read.
        rules: pairs of a `where` (see :func:`gonio.surgery.as_selector`; None for every layer that the
            regularizer can act on, embeddings excepted) and a regularizer.
        seed: of the generators of regularizers that sample.
        accumulate: calls per optimizer step. Each call gives 1/n of the penalty, and schedules and `every`
            count optimizer steps.
        heads: what :func:`gonio.surgery.anatomy` has found in the model. Then terms on weights act on the queries, keys
            and values of each head as matrices of their own, and :class:`~gonio.regularizers.ScaleShift` on pairs: for
            each head of keys and values the value's rows and the columns that read them, and (without norms in between)
            the queries and the keys; for each unit of an MLP with ReLU or a gate its row and its column.
        process_group: processes over which a batch is spread, so that terms on outputs are those of the
            whole batch; by default that of `model`, if it is wrapped in DistributedDataParallel or sharded by FSDP2.

    Raises:
        NoMatchError: if a rule reads no tensor, with the reasons.
        NotApplicableError: for a model in FSDP 1, whose weights are slices of one flat tensor; use FSDP 2.
        InvalidArgumentError: if a rule is not such a pair, ``accumulate`` is below 1, or a rule reads outputs of a
            model on a mesh of several dimensions and ``process_group`` is not given.

    Example:
        >>> model, R = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), gonio.regularizers
        >>> penalty = gonio.Penalty(model, [("0", R.Orthogonality(1e-2)), ("2", R.SelfOrthogonality(1e-2))])
        >>> loss = model(torch.randn(32, 8)).square().mean() + penalty()
        >>> list(penalty.values())
        ['0.weight/Orthogonality', '2.output/SelfOrthogonality/mean', '2.output/SelfOrthogonality/spread']
        >>> penalty.undo_()
    """

    def __init__(
        self,
        model: nn.Module,
        rules: Sequence[tuple[Where, Regularizer]],
        *,
        seed: int = 0,
        accumulate: int = 1,
        process_group: ProcessGroup | None = None,
        heads: Anatomy | None = None,
    ) -> None:
        if accumulate < 1:
            raise InvalidArgumentError(
                "Penalty(accumulate=…) needs at least 1 call per step", f"{accumulate}", "Leave it out for 1."
            )
        refuse_flat_shards(model, "Penalty", do="Shard it by fully_shard (FSDP 2) instead.", action="")
        bindings, self._remarks = bind(model, rules, heads)
        if process_group is None and any(isinstance(b.regularizer, OutputRegularizer) for b in bindings):
            process_group = data_parallel_group(model)
        self._model, self._modules = model, _identities(model)
        self._skipped = [b for b in bindings if b.skipped]
        self._terms = terms_of(bindings, seed, process_group)
        self._reading = [term for term in self._terms if isinstance(term, OutputTerm)]
        self._accumulate = accumulate
        self._calls = 0
        self._differentiable = False
        self._last: list[tuple[str, float, dict[str, Tensor]]] = []
        self._undone = False
        self._lacks_gradient, self._reached = False, False  # a call had a value to differentiate; a gradient came
        _expect_call(self)

    @property
    def step(self) -> int:
        """The optimizer step that the next call belongs to, counted from 0."""
        return self._calls // self._accumulate

    @step.setter
    def step(self, number: int) -> None:
        self._calls = number * self._accumulate

    @property
    def accumulate(self) -> int:
        """Calls per optimizer step."""
        return self._accumulate

    def __call__(self) -> Tensor:
        """The penalty of this step, a scalar to be added to the loss.

        Raises:
            InvalidArgumentError: if a layer and its weight are not in the model any more, such as a replaced output
                layer; for weights that were made in inference mode.
            NoActivationError: if a layer whose output is read did not run in training mode since the last
                call, or its hook did not fire because the model was compiled before.
        """
        self._refuse_replaced()
        self._refuse_inference(torch.is_grad_enabled())
        self._last, total = [], None
        for term, strength in self._due():
            evaluation = term.evaluate(active=strength > 0)
            if evaluation is None:
                continue
            value = evaluation.value
            # torch.add with alpha is one operation where a product and a sum are two
            total = strength * value if total is None else torch.add(total, value.to(total.device), alpha=strength)
            self._keep(term, strength, evaluation)
        self._calls += 1
        if total is None:
            return torch.zeros((), device=self._terms[0].weight.tensor().device, dtype=torch.float32)
        if not self._reached:
            self._expect_gradient(total)
        return total

    def _expect_gradient(self, total: Tensor) -> None:
        """Note when a backward pass reaches the penalty; compiled code and function transforms are not looked at."""
        if not ordinary_eager():
            self._reached = True
        elif total.requires_grad:
            self._lacks_gradient = True
            total.register_hook(partial(_reach, weakref.ref(self)))
        else:  # without gradients, or all weights are frozen
            self._lacks_gradient |= not torch.is_grad_enabled()

    def _due(self) -> Iterator[tuple[Term, float]]:
        """Each term with its coefficient in this call."""
        step = self.step
        return ((term, term.regularizer.strength_at(step) / self._accumulate) for term in self._terms)

    def add_grads_(self) -> None:
        """Add the gradient of this step's penalty to `.grad`, layer by layer, instead of calling it.

        The same gradient as ``penalty().backward()``, with the memory of one layer instead of all. Call it
        after the loss was propagated back; under ``GradScaler`` after ``scaler.unscale_(optimizer)``, under
        ``DistributedDataParallel`` on every process.

        Raises:
            InvalidArgumentError: if a rule reads outputs, whose gradient has to pass through the model; if a layer and
                its weight are not in the model any more.
        """
        if self._reading:
            raise InvalidArgumentError(
                "add_grads_() differentiates weights alone",
                f"rules that read outputs: {', '.join(term.label for term in self._reading)}",
                "Add penalty() to the loss, or put these rules into a Penalty of their own.",
            )
        self._refuse_replaced()
        self._refuse_inference(True)
        self._last = []
        with torch.no_grad():
            for term, strength in self._due():
                if isinstance(term, WeightTerm) and strength > 0 and not term.weight.frozen:
                    self._keep(term, strength, term.add_gradient_(strength))
        self._calls += 1
        self._reached = True

    def _refuse_replaced(self) -> None:
        """Raise if the model has neither the layer of a term nor its weight any more: the term would change nothing."""
        if torch.compiler.is_compiling() or (now := _identities(self._model)) == self._modules:
            return
        here = {*now, *map(id, self._model.parameters())}
        used = [(term.weight, {id(term.weight.module), *map(id, term.weight.parameters())}) for term in self._terms]
        gone = dict.fromkeys(weight.path or "the model" for weight, ids in used if not ids & here)
        if gone:
            raise InvalidArgumentError(
                "Penalty() needs the layers with which it was built",
                f"{listing([*gone])}, which the model does not have any more",
                "Build it after the last change of the layers, and call undo_() of the old one.",
            )
        self._modules = now

    def _refuse_inference(self, differentiates: bool) -> None:
        """Raise in the first call with gradients for weights with which torch computes none."""
        if differentiates and not self._differentiable:
            of = ((term.weight.label, p) for term in self._terms for p in term.weight.parameters() if p.requires_grad)
            refuse_inference("Penalty()", of)
            self._differentiable = True

    def _keep(self, term: Term, strength: float, evaluation: Evaluation) -> None:
        """Keep the numbers of a term for :meth:`values`, without their graph."""
        self._last.append((term.label, strength, evaluation.terms or {"": evaluation.value.detach()}))

    def compile_(self, *, backend: str = "inductor") -> None:
        """Compile :meth:`add_grads_` by ``torch.compile`` for the regularizers that gain from it, such as `ScaleShift`.

        The first call takes the compiler's time. Results differ by rounding. `backend` is that of ``torch.compile``.

        Raises:
            InvalidArgumentError: if no term has a compiled form.
        """
        compiled = [term.compile_(backend) for term in self._terms if isinstance(term, WeightTerm)]
        if not any(compiled):
            kinds = sorted({type(term.regularizer).__name__ for term in self._terms})
            raise InvalidArgumentError(
                "Penalty.compile_() needs a regularizer with a compiled form, such as ScaleShift",
                f"only {', '.join(kinds)}",
                "Leave it out: most of their time is spent in matrix products.",
            )

    def values(self) -> dict[str, float]:
        """The terms of the last call by name; they add up to the penalty.

        Keys are ``layer.tensor/Regularizer``, with a third part where a regularizer has several terms.
        """
        return {
            f"{label}/{name}".removesuffix("/"): strength * float(part)
            for label, strength, parts in self._last
            for name, part in parts.items()
        }

    def check(self, optimizer: torch.optim.Optimizer, *, loss: float | Tensor | None = None) -> list[str]:
        """Conflicts between this penalty and an optimizer or a loss, one sentence each.

        Finds weights that the optimizer does not have, weights that its weight decay shrinks as well, and a penalty
        that is larger than the loss of the task.

        Args:
            loss: of the same step as the last call of the penalty, without the penalty.

        Raises:
            InvalidArgumentError: if a step of SGD could carry a weight under :class:`ScaleShift` past zero, or for a
                loss before the first call.

        Example:
            >>> layer = nn.Linear(4, 4)
            >>> penalty = gonio.Penalty(layer, [(None, gonio.regularizers.L2(1e-4))])
            >>> penalty.check(torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=1e-4))
            ["weight/L2: the optimizer's weight decay shrinks this weight as well"]
        """
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        found = [] if loss is None else self._above(float(loss))
        for term in self._terms:
            known = [groups[id(p)] for p in term.weight.parameters() if id(p) in groups]
            if not known and not term.weight.frozen:
                found.append(f"{term.label}: the optimizer does not have this weight, so the term has no effect here")
            if not isinstance(term.regularizer, WeightRegularizer):
                continue
            if term.regularizer.scale_only and any(group.get("weight_decay", 0) for group in known):
                found.append(f"{term.label}: the optimizer's weight decay shrinks this weight as well")
            for group in known:
                term.regularizer.check_step(term.label, optimizer, group)
        return found

    def _above(self, loss: float) -> list[str]:
        """One sentence if the penalty of the last call is larger than the loss."""
        values = self.values()
        if not values:
            raise InvalidArgumentError(
                "Penalty.check(loss=) takes the penalty of the last call", "none", "Call it first."
            )
        total, largest = sum(values.values()), max(values, key=values.__getitem__)
        if total <= abs(loss):
            return []
        return [
            f"the penalty is {total:.3g} and the loss {loss:.3g}, so that training follows the penalty; lower its "
            f"strengths, most of all that of {largest} ({values[largest]:.3g})"
        ]

    def scaled_parameters(self) -> dict[int, str]:
        """The parameters under a regularizer of the scale alone, by identity, with the reason not to decay them."""
        return {
            id(parameter): f"{term.label} draws its scale down"
            for term in self._terms
            if isinstance(term.regularizer, WeightRegularizer) and term.regularizer.scale_only
            for parameter in term.weight.parameters()
        }

    def undo_(self) -> None:
        """Remove every hook from the model. Terms on outputs cannot be computed afterwards."""
        self._undone = True
        for term in self._reading:
            term.remove()

    def __enter__(self) -> Penalty:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo_()

    def state_dict(self) -> dict[str, Any]:
        """The step count and the state of iterative regularizers and samplers, for resuming."""
        states = {term.label: state for term in self._terms if (state := term.state()) is not None}
        return {"calls": self._calls, "terms": states, "labels": [term.label for term in self._terms]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the step at which :meth:`state_dict` was called.

        Raises:
            InvalidArgumentError: if the state is of terms that this penalty does not have, or lacks some that it has.
                Nothing is loaded then.
        """
        own, found = {term.label: term for term in self._terms}, state["terms"]
        labels = state.get("labels", [*found, *(label for label, term in own.items() if term.state() is None)])
        unknown, missing = [each for each in labels if each not in own], [each for each in own if each not in labels]
        if unknown or missing:
            parts = (("terms it does not have", unknown), ("none of its terms", missing))
            text = " and ".join(f"{what}: {listing(labels)}" for what, labels in parts if labels)
            do = "Build the penalty with the rules and the model with which the state was saved."
            raise InvalidArgumentError("Penalty.load_state_dict() takes the state of the same terms", text, do)
        self._calls = int(state["calls"])
        for label, value in found.items():
            own[label].load(value)

    def __len__(self) -> int:
        """The number of terms."""
        return len(self._terms)

    def __repr__(self) -> str:
        return f"<{self._head}, step {self.step}>"

    def _repr_html_(self) -> str:
        return html_table(self._head, ("weight", "regularizer", "status"), self._rows(), self._remarks)

    @property
    def _head(self) -> str:
        skipped = f", {len(self._skipped)} skipped" if self._skipped else ""
        return f"Penalty: {len(self)} term{'s' * (len(self) != 1)}{skipped}"

    def _rows(self) -> list[tuple[str, str, str]]:
        said = ["frozen: has no effect" if term.weight.frozen else term.remark for term in self._terms]
        rows = [(t.label.split("/")[0], describe(t.regularizer), s) for t, s in zip(self._terms, said, strict=True)]
        return rows + [(b.weight.label, describe(b.regularizer), f"skipped: {b.skipped}") for b in self._skipped]

    def __str__(self) -> str:
        rows = self._rows()
        width = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"  {a:<{width[0]}}  {b:<{width[1]}}  {c}".rstrip() for a, b, c in rows]
        return "\n".join([self._head, *lines, *(f"  note: {remark}" for remark in self._remarks)])


def _identities(model: nn.Module) -> tuple[int, ...]:
    return tuple(map(id, model.modules()))


def _reach(ref: weakref.ref[Penalty], _: Tensor) -> None:
    if (penalty := ref()) is not None:
        penalty._reached = True


def _expect_call(penalty: Penalty) -> None:
    """Warn if an optimizer of its weights makes `UNCALLED` steps before a gradient of the penalty is computed."""
    ref, steps = weakref.ref(penalty), 0

    def after(optimizer: torch.optim.Optimizer) -> None:
        nonlocal steps
        alive = ref()
        if alive is None or alive._reached or alive._undone:
            end()
            return
        steps += bool(parameter_ids(optimizer) & {id(p) for term in alive._terms for p in term.weight.parameters()})
        if steps < UNCALLED:
            return
        end()
        made = f"Penalty: {type(optimizer).__name__} made {steps} steps with weights of this penalty, which was"
        do = "Add penalty() to the loss, or call penalty.add_grads_() before each step."
        if not alive._calls:
            warnings.warn(f"{made} not called and so had no effect. {do}", GonioWarning, stacklevel=2)
        elif alive._lacks_gradient:
            why = "but no backward pass has reached it, so that it had no effect"
            do = "Add the tensor itself to the loss, without .item(), .detach() or torch.no_grad()."
            warnings.warn(f"{made} called, {why}. {do}", GonioWarning, stacklevel=2)

    end = watch(None, after=after, measures=True, verb="Penalty")


def describe(regularizer: Regularizer) -> str:
    """A regularizer as it would be written, without the fields at their defaults."""
    given = [f"{regularizer.strength:g}"]
    for field in fields(regularizer):
        value = getattr(regularizer, field.name)
        if field.name != "strength" and field.default is not MISSING and value != field.default:
            given.append(f"{field.name}={value!r}")
    return f"{type(regularizer).__name__}({', '.join(given)})"
