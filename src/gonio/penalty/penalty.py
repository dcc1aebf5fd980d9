"""Regularizers bound to a model."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError
from gonio.penalty.adding import add_gradients_
from gonio.penalty.binding import bind
from gonio.penalty.check import findings
from gonio.penalty.processes import data_parallel_group
from gonio.penalty.record import Record
from gonio.penalty.table import table
from gonio.penalty.term import OutputTerm, Term, WeightTerm, terms_of
from gonio.regularizers import Regularizer, WeightRegularizer
from gonio.surgery.where import Where

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Penalty"]


class Penalty:
    r"""The sum of regularizers over the layers that their rules choose, to be added to the loss.

    .. math:: \sum_{\text{rules}} \sum_{\text{layers}} \text{strength} \cdot \text{value}

    Call it once per training step, after the forward: ``loss = criterion(model(x), y) + penalty()``.
    Regularizers of outputs read them through forward hooks, which hold them until the call; build the penalty
    before ``torch.compile`` and before the first step. Recomputation under (non-reentrant) checkpointing is
    not counted again, evaluation is not counted at all, and a layer that ran several times since the last
    call contributes the mean over its runs.

    Every rule applies to all layers that it selects; a weight under two rules has two terms. A tensor that
    several layers share counts once per rule. Frozen weights are passed over as long as they are frozen.
    Terms on scale alone pass over weights that a normalisation layer follows. ``print(penalty)`` shows all
    of this.

    Under ``torch.amp.GradScaler`` the penalty is scaled with the loss that it is part of. Under gradient
    accumulation either divide the whole loss, penalty included, by the number of micro-batches, or divide
    the loss alone and say ``accumulate=`` here.

    Args:
        model: not changed, but for forward hooks on the layers whose outputs are read.
        rules: pairs of a `where` (see :func:`gonio.surgery.as_selector`; None for every layer that the
            regularizer can act on, embeddings excepted) and a regularizer.
        seed: of the generator with which regularizers sample.
        accumulate: calls per optimizer step. Each call gives 1/n of the penalty, and schedules and `every`
            count optimizer steps.
        process_group: processes over which a batch is spread, so that terms on outputs are those of the
            whole batch; found by itself if `model` is wrapped in DistributedDataParallel or sharded by FSDP2.

    Raises:
        NoMatchError: if a rule reads no tensor, with the reasons.
        InvalidArgumentError: if a rule is not such a pair, or ``accumulate`` is below 1.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
        >>> R = gonio.regularizers
        >>> penalty = gonio.Penalty(model, [(None, R.Orthogonality(1e-2)), ("2", R.SelfOrthogonality(1e-2))])
        >>> loss = model(torch.randn(32, 8)).square().mean() + penalty()
        >>> loss.backward()
        >>> for term in penalty.values():
        ...     print(term)
        0.weight/Orthogonality
        2.weight/Orthogonality
        2.output/SelfOrthogonality/mean
        2.output/SelfOrthogonality/spread
        >>> penalty.remove()

    See also:
        :mod:`gonio.regularizers`.
    """

    def __init__(
        self,
        model: nn.Module,
        rules: Sequence[tuple[Where, Regularizer]],
        *,
        seed: int = 0,
        accumulate: int = 1,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if accumulate < 1:
            raise InvalidArgumentError(
                "Penalty(accumulate=…) needs at least 1 call per step", f"{accumulate}", "Leave it out for 1."
            )
        bindings, self._remarks = bind(model, rules)
        group = data_parallel_group(model) if process_group is None else process_group
        self._skipped = [b for b in bindings if b.skipped]
        self._terms: list[Term] = terms_of([b for b in bindings if not b.skipped], seed, group)
        self._accumulate = accumulate
        self._calls = 0
        self._last = Record()
        self._backend: str | None = None

    @property
    def step(self) -> int:
        """The optimizer step that the next call belongs to, counted from 0."""
        return self._calls // self._accumulate

    def __call__(self) -> Tensor:
        """The penalty of this step, a scalar to be added to the loss.

        Raises:
            NoActivationError: if a layer whose output is read did not run in training mode since the last
                call, or its hook did not fire because the model was compiled before.
        """
        self._last = Record()
        parts: list[Tensor] = []
        for term in self._terms:
            strength = term.regularizer.strength_at(self.step) / self._accumulate
            evaluation = term.evaluate(active=strength > 0)
            if evaluation is not None:
                parts.append(strength * evaluation.value)
                self._last.add(term, strength, evaluation)
        self._calls += 1
        if not parts:
            return torch.zeros((), device=self._terms[0].slot.tensor().device)
        return torch.stack([part.to(parts[0].device) for part in parts]).sum()

    def add_grads_(self) -> None:
        """Add the gradient of this step's penalty to `.grad`, layer by layer, instead of calling it.

        The same gradient as ``penalty().backward()``, with the memory of one layer instead of all. Call it
        after the loss was propagated back; under ``GradScaler`` after ``scaler.unscale_(optimizer)``, under
        ``DistributedDataParallel`` on every process.

        Raises:
            InvalidArgumentError: if a rule reads outputs, whose gradient has to pass through the model.
        """
        reading = [term.label for term in self._terms if isinstance(term, OutputTerm)]
        if reading:
            raise InvalidArgumentError(
                "add_grads_() differentiates weights alone",
                f"rules that read outputs: {', '.join(reading)}",
                "Add penalty() to the loss, or put these rules into a Penalty of their own.",
            )
        self._last = Record()
        active: list[tuple[WeightTerm, float]] = []
        step = self.step
        for term in self._terms:
            strength = term.regularizer.strength_at(step) / self._accumulate
            if strength > 0 and isinstance(term, WeightTerm) and not term.slot.frozen:
                active.append((term, strength))
        for (term, strength), evaluation in zip(active, add_gradients_(active, self._backend), strict=True):
            self._last.add(term, strength, evaluation)
        self._calls += 1

    def compile_(self, *, backend: str = "inductor") -> None:
        """Let :meth:`add_grads_` use kernels that ``torch.compile`` makes, for the terms that have them: `ScaleShift`.

        They read weights on CPU once and update once; weights and gradients that lie in flat buffers, one after
        another, in one call. The first call takes a compiler's time. Results differ by rounding.

        Args:
            backend: of ``torch.compile``.

        Raises:
            InvalidArgumentError: if no term has a compiled form.

        Example:
            >>> layer = nn.Linear(256, 256)
            >>> penalty = gonio.Penalty(layer, [(None, gonio.regularizers.ScaleShift(1e-3))])
            >>> penalty.compile_(backend="eager")
            >>> penalty.add_grads_()
            >>> w = layer.weight.detach()
            >>> torch.allclose(layer.weight.grad, 1e-3 * w / w.norm() ** 2)
            True
        """
        kinds = sorted({type(term.regularizer).__name__ for term in self._terms})
        if not any(isinstance(t.regularizer, WeightRegularizer) and t.regularizer.compilable for t in self._terms):
            raise InvalidArgumentError(
                "Penalty.compile_() needs a term with a compiled form, which ScaleShift has",
                f"terms of {', '.join(kinds)} alone",
                "Leave it out: their time goes into matrix products.",
            )
        self._backend = backend

    def values(self) -> dict[str, float]:
        """What each term gave in the last call; they add up to the penalty.

        Keys are ``layer.tensor/Regularizer``, with a third part where a regularizer has several terms.
        Empty before the first call.
        """
        return self._last.values()

    def check(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """What is wrong between this penalty and an optimizer, in words; nothing, if all is well.

        Finds weights that the optimizer does not have, and scale that its weight decay shrinks as well.

        Raises:
            InvalidArgumentError: if a step of SGD could carry a weight under :class:`ScaleShift` past zero.

        Example:
            >>> layer = nn.Linear(4, 4)
            >>> penalty = gonio.Penalty(layer, [(None, gonio.regularizers.L2(1e-4))])
            >>> penalty.check(torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=1e-4))
            ["weight/L2: the optimizer's weight decay shrinks this weight as well"]
        """
        return findings(self._terms, optimizer)

    def scaled_parameters(self) -> dict[int, str]:
        """Parameters under a term on scale, by identity, and the term."""
        return {
            id(parameter): f"{term.label} draws its scale down"
            for term in self._terms
            if isinstance(term.regularizer, WeightRegularizer) and term.regularizer.scale_only
            for parameter in term.slot.parameters()
        }

    def remove(self) -> None:
        """Take every hook off the model. Terms on outputs cannot be computed afterwards."""
        for term in self._terms:
            term.remove()

    def __enter__(self) -> Penalty:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def state_dict(self) -> dict[str, Any]:
        """The step count and what iterative regularizers and samplers carry on, for resuming."""
        return {"calls": self._calls, "terms": {t.label: s for t in self._terms if (s := t.state()) is not None}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self._calls = int(state["calls"])
        for term in self._terms:
            if term.label in state["terms"]:
                term.load(state["terms"][term.label])

    def __str__(self) -> str:
        return table(self._terms, self._skipped, self._remarks)
