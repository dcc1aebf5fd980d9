"""The terms of a penalty: which tensors and outputs each rule reads, which it skips and why."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gonio.editing.where import Where, as_selector, asked_of, left_out, select
from gonio.errors import InvalidArgumentError, NoMatchError, with_article
from gonio.execution import ProcessGroup
from gonio.geometry.norms import whole
from gonio.geometry.views import matrix_view, unview, why_not_dense
from gonio.parametrizations.mechanism import parametrization_of
from gonio.penalty.hooks import OutputHook
from gonio.penalty.parts import Cut, Cuts
from gonio.penalty.weights import WeightRef, layouts_of, weights_of
from gonio.regularizers import Evaluation, OutputRegularizer, Regularizer, WeightRegularizer
from gonio.regularizers.base import AddGradient
from gonio.seeding import generator
from gonio.surgery.blocks import Anatomy
from gonio.surgery.facts import TABLES
from gonio.surgery.graph import Graph, trace

_WITH_OUTPUTS = (nn.Linear, nn.modules.conv._ConvNd)
_KINDS = (WeightRegularizer, OutputRegularizer)  # what a term can read


# --- which rule reads what ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Binding:
    """One regularizer on one weight or on the outputs of its layer."""

    weight: WeightRef
    regularizer: Regularizer
    skipped: str | None = None  # why the regularizer does not act there, if so
    remark: str = ""  # for the table


def bind(
    model: nn.Module, rules: Sequence[tuple[Where, Regularizer]], heads: Anatomy | None = None
) -> tuple[list[Binding], list[str]]:
    """The bindings of each rule, and remarks on the model.

    Args:
        heads: the anatomy by which weights of attention and MLP blocks are taken apart.

    Raises:
        NoMatchError: if a rule reads nothing.
        InvalidArgumentError: if a rule is not a pair of a `where` and a regularizer.
    """
    if isinstance(rules, Regularizer):
        raise InvalidArgumentError(
            "Penalty(model, rules) takes a list of pairs (where, regularizer)",
            with_article(type(rules).__name__),
            f"For all layers write Penalty(model, [(None, {type(rules).__name__}(…))]).",
        )
    context = _Context(model, heads)
    bindings, left = [], dict[str, str]()
    for rule in rules:
        if not (isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], _KINDS)):
            raise InvalidArgumentError(
                "Penalty(model, rules) takes pairs (where, regularizer)", repr(rule), _instead(rule)
            )
        where, regularizer = rule
        found = list(_bindings(model, where, regularizer, context))
        if all(b.skipped for b in found):
            refused = {b.weight.label: b.skipped or "" for b in found}
            raise NoMatchError(type(regularizer).__name__, asked_of(as_selector(where)), [], refused=refused)
        bindings += found
        left |= left_out(model, where, can_act=partial(can_act, kind=type(regularizer), named=where is not None))
    return bindings, [*context.remarks(), *(f"{path} has no term: {why}" for path, why in left.items())]


def _instead(rule: object) -> str:
    """What to pass instead of a pair whose second part is no regularizer."""
    given = rule[1] if isinstance(rule, tuple) and len(rule) == 2 else None
    if isinstance(given, Regularizer) or given is Regularizer:
        return "Pass one that reads weights or outputs, such as Orthogonality(1e-4): this one computes nothing."
    if isinstance(given, type) and issubclass(given, Regularizer):
        return f"Pass an object with a strength, such as {given.__name__}(1e-4)."
    if isinstance(given, str):
        return f"Pass an object of gonio.regularizers instead of {given!r}, such as Orthogonality(1e-4)."
    return "E.g. [(None, L2(1e-4))]."


class _Context:
    """What follows each layer; the model is traced when that is first needed."""

    def __init__(self, model: nn.Module, heads: Anatomy | None = None) -> None:
        self._model = model
        self._cuts = None if heads is None else Cuts(heads)

    def parts(self, weight: WeightRef, regularizer: WeightRegularizer) -> list[tuple[WeightRef, Cut | None]]:
        """A weight in the parts on which the regularizer acts, each by itself."""
        return [(weight, None)] if self._cuts is None else self._cuts.of(weight, pairs=regularizer.reads_pairs)

    @cached_property
    def _graph(self) -> Graph:
        return trace(self._model)

    @cached_property
    def norms(self) -> dict[int, str]:
        """By the identity of a module, the normalisation layer that makes the scale of its weight irrelevant."""
        return {id(self._graph.model.get_submodule(path)): norm for path, norm in self._graph.norm_after.items()}

    def activation_after(self, module: nn.Module) -> str | None:
        """The name of the activation that follows, if it is known."""
        found = self._graph.activation_after.items()
        return next((name for path, name in found if self._graph.model.get_submodule(path) is module), None)

    def remarks(self) -> list[str]:
        """Why no normalisation layer was found, if the model could not be traced."""
        if not vars(self).get("norms", True) and self._graph.reason:
            return [
                f"the model cannot be traced ({self._graph.reason}), so weights in front of a normalisation layer are "
                "not recognised; exclude them in `where`"
            ]
        return []


def can_act(module: nn.Module, kind: type[Regularizer], *, named: bool) -> str | None:
    """Why a regularizer of this kind cannot act on a layer; None if it can.

    `named` is whether a `where` chooses the layer, which lookup tables need.

    Example:
        >>> from gonio.penalty.terms import can_act
        >>> can_act(nn.ReLU(), gonio.regularizers.L2, named=False)
        'it has no weight with filters'
    """
    if not named and isinstance(module, TABLES):
        return "it is a lookup table; name it in `where` to include it"
    if issubclass(kind, OutputRegularizer):
        if not isinstance(module, _WITH_OUTPUTS):
            return "it is no linear or convolution layer"
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            return "nn.MultiheadAttention uses its weight without calling it, so it has no output"
    names = layouts_of(module)
    if not names:
        lazy = any(is_lazy(p) for p in module._parameters.values() if p is not None)
        return "it is lazy; run one batch first" if lazy else "it has no weight with filters"
    return next(filter(None, (why_not_dense(module._parameters.get(name)) for name in names)), None)


def _bindings(model: nn.Module, where: Where, regularizer: Regularizer, context: _Context) -> Iterator[Binding]:
    able = partial(can_act, kind=type(regularizer), named=where is not None)
    owners: dict[tuple[object, ...], str] = {}
    for site in select(model, where, verb=type(regularizer).__name__, can_act=able):
        for weight in weights_of(site):
            if not isinstance(regularizer, WeightRegularizer):
                yield Binding(weight, regularizer)
                continue
            for part, cut in context.parts(weight, regularizer):
                skipped = _why_skipped(part, cut, regularizer, context)
                if skipped is None:
                    owner = owners.setdefault(part.key, part.label)
                    if owner != part.label:
                        skipped = f"is the same tensor as {owner}, which has the term"
                yield Binding(part, regularizer, skipped) if skipped else _fitted(part, cut, regularizer, context)


def _fitted(weight: WeightRef, cut: Cut | None, regularizer: WeightRegularizer, context: _Context) -> Binding:
    """The regularizer with settings for this weight."""
    if cut is not None and cut.power > 1:
        regularizer = replace(regularizer, strength=cut.power * regularizer.strength)
    fitted = regularizer.fitted_to(weight.tensor(), weight.layout)
    if fitted.draws_norms and (norm := _fixed_norm(weight)) is not None:
        raise InvalidArgumentError(
            f"{type(fitted).__name__} draws the norms of filters to 1",
            f"norms of {norm:.3g} in {weight.label}, which its parametrization fixes",
            'Pass filters="unit", with which the term acts on angles alone.',
        )
    pair = cut.remark if cut is not None else ""
    said = fitted.remark((lambda: None) if pair else partial(context.activation_after, weight.module))
    return Binding(weight, fitted, None, "; ".join(filter(None, (said, pair))))


def _fixed_norm(weight: WeightRef) -> float | None:
    """The median norm of the filters where a parametrization keeps each whatever is trained, and it is not 1."""
    found = parametrization_of(weight.module, weight.name)
    raw = weight.module._parameters.get(weight.name)
    if found is None or raw is None or raw.is_meta or type(raw.data) is not Tensor or [*found.parameters()]:
        return None  # learned magnitudes are not fixed; of a shard the filters are not whole
    with torch.no_grad():
        view = matrix_view(raw, weight.layout)
        factors = torch.linspace(0.5, 2.0, view.shape[1], dtype=raw.dtype, device=raw.device)[:, None]
        moved = unview(view * factors, raw.shape, weight.layout)
        norms = [matrix_view(found(each), weight.layout).float().norm(dim=-1) for each in (raw, moved)]
    middle = float(norms[0].median())
    fixed = torch.allclose(norms[0], norms[1], rtol=1e-3)
    return middle if fixed and abs(middle - 1) > 1e-2 else None


def _why_skipped(weight: WeightRef, cut: Cut | None, regularizer: WeightRegularizer, context: _Context) -> str | None:
    if cut is not None and cut.skipped and regularizer.skips_before_norm:
        return cut.skipped
    norm = context.norms.get(id(weight.module)) if regularizer.skips_before_norm else None
    if norm is not None:
        return f"its scale does not matter: {norm} normalises its output"
    return regularizer.reason_to_skip(weight.tensor())


# --- terms ----------------------------------------------------------------------------------------------


class Term(ABC):
    """A summand of the penalty: a binding with its state from step to step."""

    def __init__(self, binding: Binding, label: str) -> None:
        self.weight = binding.weight
        self.regularizer = binding.regularizer
        self.label = label
        self.remark = binding.remark

    @abstractmethod
    def evaluate(self, *, active: bool) -> Evaluation | None:
        """The value at this step, or None if the term is not active in it."""

    @abstractmethod
    def state(self) -> Tensor | None:
        """The state on which the next step depends."""

    @abstractmethod
    def load(self, state: Tensor) -> None:
        """Set the state to the result of :meth:`state`."""


class WeightTerm(Term):
    """A regularizer of a weight."""

    def __init__(self, binding: Binding, regularizer: WeightRegularizer, label: str) -> None:
        super().__init__(binding, label)
        self.regularizer: WeightRegularizer = regularizer
        self._evaluate = regularizer.evaluate
        self._add_: AddGradient = regularizer.add_gradient_
        self._state: Tensor | None = None

    def evaluate(self, *, active: bool) -> Evaluation | None:
        if not active or self.weight.frozen:
            return None
        return self.keep(self._evaluate(self.weight.tensor(), self.weight.layout, state=self._state))

    def keep(self, evaluation: Evaluation) -> Evaluation:
        """Start the next step from this one's state; the evaluation, as one number also over several processes."""
        self._state = evaluation.state
        if type(evaluation.value) is Tensor:
            return evaluation
        terms = {name: whole(term) for name, term in evaluation.terms.items()}
        return Evaluation(whole(evaluation.value), terms, evaluation.state)

    def add_gradient_(self, strength: float) -> Evaluation:
        """Add strength × the gradient to `.grad` of the parameters behind the weight; under ``no_grad``."""
        weight, layout = self.weight.stored(), self.weight.layout
        if weight is not None:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            return self.keep(self._add_(weight.grad, weight, layout, factor=strength, state=self._state))
        with torch.enable_grad():
            effective = self.weight.tensor()
        grad = torch.zeros_like(effective)
        evaluation = self._add_(grad, effective, layout, factor=strength, state=self._state)
        effective.backward(grad)
        return self.keep(evaluation)

    def compile_(self, backend: str) -> bool:
        """Compile :meth:`add_gradient_`; False if the regularizer has no compiled form."""
        compiled = self.regularizer.compiled(backend)
        self._add_ = compiled or self._add_
        return compiled is not None

    def state(self) -> Tensor | None:
        return self._state

    def load(self, state: Tensor) -> None:
        self._state = state


class OutputTerm(Term):
    """A regularizer of a layer's outputs."""

    def __init__(
        self,
        binding: Binding,
        regularizer: OutputRegularizer,
        label: str,
        *,
        generator: torch.Generator,
        process_group: ProcessGroup | None,
    ) -> None:
        super().__init__(binding, label)
        self._evaluate = regularizer.evaluate
        self._probes = regularizer.reads_probes
        path = self.weight.path or "the model"
        self._hook = OutputHook(self.weight.module, path, without_bias=not regularizer.ignores_bias)
        self._generator = generator
        self._group = process_group

    def evaluate(self, *, active: bool) -> Evaluation | None:
        if self.weight.frozen:
            self._hook.forget()
            return None
        outputs = self._hook.take()
        if not active:
            return None
        found = [self._of(output) for output in outputs] if self._probes is None else [self._of_probes(self._probes)]
        if len(found) == 1:
            return found[0]
        terms = {name: torch.stack([e.terms[name] for e in found]).mean() for name in found[0].terms}
        return Evaluation(torch.stack([e.value for e in found]).mean(), terms)

    def _of(self, output: Tensor) -> Evaluation:
        module = self.weight.module
        if not isinstance(module, nn.modules.conv._ConvNd):  # a linear layer has its channels last
            x = output.reshape(-1, output.shape[-1])
        else:
            x = output if output.ndim == len(module.kernel_size) + 2 else output.unsqueeze(0)
        samples, channels = x.numel() // x.shape[1], x.shape[1]
        self.remark = ""
        if samples < channels:
            self.remark = (
                f"{samples} samples for {channels} filters: not all their angles can be told apart, and the "
                f"spread does not fall below {1 / max(samples, 1):.2g}"
            )
        return self._evaluate(x, groups=self.weight.layout.groups, generator=self._generator, process_group=self._group)

    def _of_probes(self, count: int) -> Evaluation:
        layout = self.weight.layout
        filters = matrix_view(whole(self.weight.tensor()), layout)
        # drawn on the CPU: the same on each device
        probes = torch.randn(count, filters.shape[-1], generator=self._generator, device="cpu", dtype=torch.float32)
        outputs = filters @ probes.to(filters, non_blocking=True).T
        return self._evaluate(outputs.flatten(0, 1).T, groups=layout.groups)

    def state(self) -> Tensor | None:
        return self._generator.get_state()

    def load(self, state: Tensor) -> None:
        self._generator.set_state(state)

    def remove(self) -> None:
        self._hook.remove()


def terms_of(bindings: Sequence[Binding], seed: int, process_group: ProcessGroup | None) -> list[Term]:
    """A term for each binding that is not skipped, under labels that differ."""
    terms: list[Term] = []
    labels: dict[str, int] = {}
    for binding in bindings:
        if binding.skipped:
            continue
        weight, regularizer = binding.weight, binding.regularizer
        reads = weight.label if isinstance(regularizer, WeightRegularizer) else f"{weight.path}.output".lstrip(".")
        label = f"{reads}/{type(regularizer).__name__}"
        labels[label] = labels.get(label, 0) + 1
        if labels[label] > 1:
            label = f"{label}#{labels[label]}"
        if isinstance(regularizer, OutputRegularizer):
            own = generator(seed, "penalty", label)
            terms.append(OutputTerm(binding, regularizer, label, generator=own, process_group=process_group))
        elif isinstance(regularizer, WeightRegularizer):
            terms.append(WeightTerm(binding, regularizer, label))
    return terms
