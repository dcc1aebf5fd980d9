"""What a run can be judged by beside its task's metric: the closed registry of measures, one number per run.

A plan names a measure and its options as data (:class:`~gonio.lab.planning.plan.Measure`). Its function gets the
run as a `Subject` and returns one finite number; it may change the model, which nothing reads afterwards.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gonio.errors import InvalidArgumentError, NotApplicableError, UnknownNameError
from gonio.geometry import (
    Layout,
    angles,
    conv_spectral_norm_bound,
    filter_norms,
    layout_of,
    matrix_view,
    singular_values,
)
from gonio.lab.planning.plan import Measure, Training
from gonio.lab.running.training import batches, evaluate, fit
from gonio.lab.tasks.task import Batch, Examples, Split, Task
from gonio.measuring import Tracker
from gonio.models.deep import Residual
from gonio.nn import DecoupledConv2d, SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d, angular, magnitude
from gonio.optim import hold_
from gonio.recipes import Recipe
from gonio.seeding import derive_seed, generator
from gonio.surgery import balance_, calibrate_, equivalent, swap_
from gonio.surgery.graph import trace

_SAME = 1e-9  # largest relative deviation of outputs in float64 that counts as the same function
_SWITCHABLE = (SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d)
_PROBES = 256  # test examples on which a measure that needs gradients or attacks is computed


@dataclass(frozen=True)
class Subject:
    """A run, as a measure sees it.

    Attributes:
        model: in evaluation mode, with the weights of the scored epoch; as it starts for a measure of the start.
        curve: `train_loss` and `val_score` per epoch; empty for a measure of the start.
        seed: of the run's random numbers.
        robustness: accuracy by attack, if the plan attacks models.
    """

    model: nn.Module
    task: Task
    training: Training
    seed: int
    curve: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    robustness: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """A measure of the registry.

    Attributes:
        function: of a subject and options; its docstring says what it is.
        unit: of the number.
        worst: the number of a run that diverged; None: the worst finished run counts.
        better: whether larger or smaller scores are better; None: the measure is no score, and has no better side.
        start: whether the model is measured before training, which is then left out.
        attacked: whether the run is attacked first.
    """

    function: Callable[..., float]
    unit: str
    worst: float | None = None
    better: Literal["max", "min"] | None = None
    start: bool = False
    attacked: bool = False

    @property
    def summary(self) -> str:
        """What is measured, in one sentence."""
        return (inspect.getdoc(self.function) or "").split("\n\n")[0].replace("\n", " ")


def kind_of(measure: Measure) -> Kind:
    """The registered measure, after a check of the options.

    Raises:
        UnknownNameError: there is no such measure.
        InvalidArgumentError: it has no such option.
    """
    if measure.name not in MEASURES:
        raise UnknownNameError("measure", measure.name, MEASURES)
    kind = MEASURES[measure.name]
    known = list(inspect.signature(kind.function).parameters)[1:]
    unknown = sorted(set(measure.options) - set(known))
    if unknown:
        has = f"the measure {measure.name!r} has the options {', '.join(known) or 'none'}"
        raise InvalidArgumentError(has, ", ".join(unknown), "Leave it out, or choose one of these.")
    return kind


# --- scores -----------------------------------------------------------------------------------------------


def accuracy(subject: Subject) -> float:
    """Accuracy on the test split, at the epoch with the best validation score."""
    return _score(subject)


def trains(subject: Subject, *, least: float = 50.0) -> float:
    """Share of runs that train: 100 if the test accuracy is at least `least` percent, else 0."""
    return 100.0 if _score(subject) >= least else 0.0


def epochs_to(subject: Subject, *, score: float) -> float:
    """Epochs until the validation score first reaches `score`; one more than there are if it never does."""
    reached = (i for i, found in enumerate(subject.curve["val_score"], start=1) if found is not None and found >= score)
    return float(next(reached, subject.training.epochs + 1))


def loss_after(subject: Subject, *, epochs: int) -> float:
    """Mean training loss of the epoch with this number."""
    found = subject.curve["train_loss"][epochs - 1]
    return math.inf if found is None else found


def curve_roughness(subject: Subject) -> float:
    """How unsteady training is: the sum of all rises of the epoch's training loss, over its total fall."""
    losses = [loss for loss in subject.curve["train_loss"] if loss is not None]
    rises = sum(max(0.0, after - before) for before, after in pairwise(losses))
    return 100 * rises / max(losses[0] - min(losses), 1e-12)


def calibrated_accuracy(subject: Subject, *, average: str = "moving") -> float:
    """Accuracy with statistics of the normalisation that are `moving` averages or averages over `batches`."""
    if average == "batches":
        standardised = [subject.task.outputs(nn.Identity(), inputs) for inputs, _ in _first_epoch(subject)]
        calibrate_(subject.model, standardised, variance="mean")
    return _score(subject)


def robust_accuracy(subject: Subject, *, attack: str = "worst") -> float:
    """Accuracy on attacked test examples; `worst` counts an example as correct only if no attack misled the model."""
    return float(subject.robustness[attack])


def hidden_gradients(subject: Subject) -> float:
    """Points by which PGD is weaker than noise, transferred examples or PGD on smoothed gradients: hidden gradients.

    It is 0 where PGD is the most harmful of them, and then the accuracy under PGD can be taken at its word.
    """
    others = (subject.robustness[name] for name in ("noise", "transfer", "smoothed") if name in subject.robustness)
    return max(0.0, float(subject.robustness["pgd"]) - min(others))


def accuracy_after(subject: Subject, *, epochs: int, recipe: Mapping[str, Any] | None = None) -> float:
    """Accuracy on the test split after the trained model was changed by a recipe and trained for `epochs` more.

    The second training has the learning rate, decay and schedule of the first one, and chooses its own best epoch.
    """
    changed = Recipe.from_dict({**(recipe or {}), "name": "later"})
    applied = changed.apply_(subject.model, seed=subject.seed)
    training, seed = replace(subject.training, epochs=epochs), derive_seed(subject.seed, "later")
    done = fit(subject.model, subject.task, training=training, seed=seed, penalty=applied.penalty, hold=applied.hold_)
    if done.diverged or done.state is None:
        return math.nan
    subject.model.load_state_dict(done.state)
    return _score(subject)


def bits_per_byte(subject: Subject) -> float:
    """Bits per byte of the text on the test split, at the epoch with the best validation score."""
    return _score(subject)


def overfit(subject: Subject) -> float:
    """Points by which the accuracy on the training split exceeds that on the test split."""
    return _score(subject, split=subject.task.train) - _score(subject)


def _score(subject: Subject, model: nn.Module | None = None, split: Examples | None = None) -> float:
    found = evaluate(model or subject.model, subject.task, split or subject.task.test)
    return math.nan if found is None else found


# --- angles and signals -----------------------------------------------------------------------------------


def angle_bias(subject: Subject, *, read: str = "weights", layers: str = "conv", skip: int = 1) -> float:
    """Distance of the mean angle between filters from 90 degrees, averaged over the layers.

    Args:
        read: the angles from the `weights`, or from the signs of the layers' `outputs` for test examples.
        layers: `conv` or `linear`. skip: number of first layers that are left out, e.g. a stem of few dimensions.
    """
    found = _layer_angles(subject, read, layers, skip)
    return sum(abs(float(angle.mean()) - 90) for angle in found) / len(found)


def angle_spread(subject: Subject, *, read: str = "weights", layers: str = "conv", skip: int = 1) -> float:
    """Standard deviation of the angles between the filters of a layer, averaged over the layers."""
    found = _layer_angles(subject, read, layers, skip)
    return sum(float(angle.std()) for angle in found) / len(found)


def angle_error(subject: Subject, *, layers: str = "conv", skip: int = 1) -> float:
    """Mean distance of the angles read from outputs to those of the weights: 0 for inputs of all directions alike."""
    seen, exact = (_layer_angles(subject, read, layers, skip) for read in ("outputs", "weights"))
    return sum(float((a - b).abs().mean()) for a, b in zip(seen, exact, strict=True)) / len(exact)


@torch.no_grad()
def _layer_angles(subject: Subject, read: str, layers: str, skip: int) -> list[Tensor]:
    """The pairwise angles of each chosen layer in degrees; the classifier, the last linear layer, is left out."""
    modules = [module for module, _ in _weights(subject.model)]
    convs = [module for module in modules if isinstance(module, nn.modules.conv._ConvNd)]
    linears = [module for module in modules if isinstance(module, nn.Linear)][:-1]
    chosen = (convs if layers == "conv" else linears)[skip:]
    if not chosen:
        raise InvalidArgumentError("the angles of a model need layers", f"no {layers} layer", "Use another model.")
    if read == "outputs":
        return _angles_of_outputs(subject, chosen)
    return [_pairs(angles(matrix_view(m.weight.double(), layout_of(m)))) for m in chosen]


def _angles_of_outputs(subject: Subject, chosen: Sequence[nn.Module]) -> list[Tensor]:
    """Angles by the lemma E[sgn⟨u, x⟩ sgn⟨v, x⟩] = 1 − 2θ/π, with the layer's own inputs as x and its bias left out."""
    found: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, _: Any, output: Tensor) -> None:
        bias = getattr(module, "bias", None)
        flat = output.flatten(2).transpose(0, 1).flatten(1) if output.ndim > 2 else output.T
        found[module] = (flat if bias is None else flat - bias[:, None]).sign().double()

    handles = [module.register_forward_hook(keep) for module in chosen]
    subject.task.outputs(subject.model.eval(), subject.task.test.inputs[:_PROBES])
    for handle in handles:
        handle.remove()
    signs = [found[module] for module in chosen]
    return [_pairs(torch.deg2rad(90 * (1 - sign @ sign.T / sign.shape[1])[None])) for sign in signs]


def _pairs(radians: Tensor) -> Tensor:
    """The angles above the diagonal, in degrees."""
    first, second = torch.triu_indices(radians.shape[-2], radians.shape[-1], offset=1)
    return torch.rad2deg(radians)[:, first, second].flatten()


@torch.no_grad()
def signal_gain(subject: Subject) -> float:
    """Decades by which the RMS of the signal grows from the first to the last layer in front of the classifier."""
    sizes: list[float] = []
    modules = [module for module, _ in _weights(subject.model)]
    handles = [m.register_forward_pre_hook(lambda _, given: sizes.append(_rms(given[0]))) for m in modules[1:]]
    subject.task.outputs(subject.model.eval(), subject.task.test.inputs[:_PROBES])
    for handle in handles:
        handle.remove()
    return math.log10(max(sizes[-1], 1e-300) / max(sizes[0], 1e-300))


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def batch_share(subject: Subject) -> float:
    """Share of the batch statistics in the mixtures of all switchable norms, mean and variance together."""
    mixtures = [m.mixture() for m in subject.model.modules() if isinstance(m, _SWITCHABLE)]
    shares = [share["batch"] for mixture in mixtures for share in mixture.values()]
    if not shares:
        raise InvalidArgumentError("batch_share needs switchable norms", "none in the model", "Swap them in.")
    return 100 * sum(shares) / len(shares)


# --- scale -----------------------------------------------------------------------------------------------


@torch.no_grad()
def penalty_change(subject: Subject, *, penalty: str = "l2", move: str = "balance") -> float:
    """Change of a penalty on all weights in percent, when scale is moved between the layers of the trained model.

    The outputs in float64 must stay the same to 1e-9, or the run fails.

    Args:
        penalty: `l2`, the sum of squares; or `log`, the sum of the logarithms of the layers' norms.
        move: `balance`, to the least sum of squares; or `shift`, random factors of the layers with product 1.
    """
    model = copy.deepcopy(subject.model).double().eval()
    before = _penalty(model, penalty)
    _moved(model, subject, move=move, level="layer", spread=1.0)
    return 100 * (_penalty(model, penalty) - before) / abs(before)


def _penalty(model: nn.Module, penalty: str) -> float:
    norms = torch.stack([weight.double().norm() for _, weight in _weights(model)])
    return float(norms.square().sum() if penalty == "l2" else norms.log().sum())


@torch.no_grad()
def int8_accuracy(subject: Subject, *, spread: float = 0.0, balance: bool = False, bits: int = 8) -> float:
    """Test accuracy with every weight rounded to integers of one scale per tensor.

    Args:
        spread: first, random factors with this standard deviation of their log2 are moved between the neurons of
            successive layers; the function stays.
        balance: then, scale is moved back with :func:`gonio.balance_`. bits: of the integers, 0 for no rounding.
    """
    model = copy.deepcopy(subject.model).double().eval()
    if spread:
        _moved(model, subject, move="shift", level="neuron", spread=spread)
    if balance:
        _moved(model, subject, move="balance", level="neuron", spread=0.0)
    for _, weight in _weights(model):
        if bits:
            step = weight.abs().amax() / (2 ** (bits - 1) - 1)
            weight.copy_((weight / step).round() * step)
    return _score(subject, model.to(next(subject.model.parameters()).dtype))


def _moved(model: nn.Module, subject: Subject, *, move: str, level: str, spread: float) -> None:
    """Move scale in place, and check that the function is the same."""
    before = copy.deepcopy(model)
    if move == "balance":
        balance_(model, level="layer" if level == "layer" else "neuron")
    else:
        _shift(model, level, spread, generator(subject.seed, "shift"))
    found = equivalent(before, model, example=_standardised(subject))
    if found.relative > _SAME:
        raise NotApplicableError("moving scale", "", f"its outputs change ({found})", "Use a chain with ReLU.")


def _shift(model: nn.Module, level: str, spread: float, draw: torch.Generator) -> None:
    """Random factors between successive layers of a chain; each factor leaves with its inverse."""
    chain = list(_weights(model))
    for (module, weight), (_, later) in pairwise(chain):
        size = len(weight) if level == "neuron" else 1
        factors = torch.exp2(spread * torch.randn(size, generator=draw, dtype=weight.dtype)).expand(len(weight))
        weight.mul_(factors.view(-1, *(1,) * (weight.ndim - 1)))
        if module.bias is not None:
            module.bias.mul_(factors)
        inverse = factors.repeat_interleave(later.shape[1] // len(weight)).reciprocal()
        later.mul_(inverse.view(1, -1, *(1,) * (later.ndim - 2)))


def shift_deviation(subject: Subject) -> float:
    """Largest change of the outputs, in percent, when random factors with product 1 move between the layers.

    It is 0 to rounding where the activations are positively homogeneous.
    """
    model = copy.deepcopy(subject.model).double().eval()
    before = copy.deepcopy(model)
    with torch.no_grad():
        _shift(model, "layer", 1.0, generator(subject.seed, "shift"))
    return 100 * equivalent(before, model, example=_standardised(subject)).relative


def rectified_deviation(subject: Subject, *, biases: str = "kept") -> float:
    """Largest change of the outputs, in percent, when every convolution becomes the operator ‖w‖‖x‖·max(0, cos θ).

    Args:
        biases: of the convolutions, `kept` or set to `zero` first.
    """
    model = copy.deepcopy(subject.model).double().eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.bias is not None and biases == "zero":
            nn.init.zeros_(module.bias)
    changed = copy.deepcopy(model)
    parts: dict[str, Any] = {
        "magnitude": magnitude.Linear(),
        "angular": angular.RectifiedCosine(),
        "weighted": "linear",
    }
    swap_(changed, DecoupledConv2d.from_conv, where=nn.Conv2d, **parts)
    return 100 * equivalent(model, changed, example=_standardised(subject)).relative


def _standardised(subject: Subject) -> Tensor:
    """The first test examples in float64, as the model sees them."""
    return subject.task.outputs(nn.Identity(), subject.task.test.inputs[:_PROBES]).double()


# --- spectral norms ---------------------------------------------------------------------------------------


@torch.no_grad()
def largest_sigma(subject: Subject) -> float:
    """Largest singular value of any layer's matrix of filters."""
    return max(
        float(singular_values(matrix_view(weight.double(), layout_of(module))).max())
        for module, weight in _weights(subject.model)
    )


@torch.no_grad()
def lipschitz_bound(subject: Subject, *, norm: str = "spectral") -> float:
    """Decades of the product of all layers' norms, which bounds the gradient of the logits by the input.

    A residual block counts with 1 + the product of its branch. For chains of linear and convolutional layers, such
    blocks, and activations of slope at most 1, without normalisation.

    Args:
        norm: `spectral`, the operator norm; or `frobenius`, which is never smaller, the one of a scale-shift-invariant
            penalty, whose sum of logarithms is the logarithm of this bound.
    """
    return math.log10(_bound(subject.model, norm))


def _bound(module: nn.Module, norm: str) -> float:
    if isinstance(module, Residual):
        return 1 + _bound(module.branch, norm)
    if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        return _operator_norm(module.weight.detach().double(), layout_of(module), norm)
    return math.prod(_bound(child, norm) for child in module.children())


def _operator_norm(weight: Tensor, layout: Layout, norm: str) -> float:
    if norm == "frobenius":  # a patch holds each input at most once per tap, so the map's norm is that much larger
        return float(weight.norm()) * math.sqrt(math.prod(weight.shape[2:]))
    if weight.ndim == 2:
        return float(singular_values(weight).max())
    return float(conv_spectral_norm_bound(weight, layout=layout))


def input_gradient(subject: Subject) -> float:
    """Decades of the largest spectral norm of the gradient of the logits by the input, over test examples."""
    inputs = subject.task.test.inputs[:_PROBES]
    model = copy.deepcopy(subject.model).eval()
    jacobians = torch.func.vmap(torch.func.jacrev(lambda x: subject.task.outputs(model, x[None])[0]))(inputs)
    flat = jacobians.detach().flatten(2).double()
    return math.log10(max(float(torch.linalg.matrix_norm(flat, 2).max()), 1e-300))


def lipschitz_slack(subject: Subject, *, norm: str = "spectral") -> float:
    """Decades by which the product of the layers' norms exceeds the largest gradient over test examples."""
    return lipschitz_bound(subject, norm=norm) - input_gradient(subject)


def gradient_change(subject: Subject, *, steps: int = 20) -> float:
    """Mean change of the gradient by a step, in percent: ‖∇L(w − η∇L) − ∇L(w)‖ / ‖∇L(w)‖ on the batch of the step.

    The steps are plain gradient steps from the start with the plan's learning rate.
    """
    subject.model.train()
    found = []
    for batch in islice(_first_epoch(subject), steps):
        before = _flat_gradient(subject, batch)
        _descend(subject)
        after = _flat_gradient(subject, batch)
        found.append(float((after - before).norm() / before.norm().clamp_min(1e-300)))
    return 100 * sum(found) / len(found)


def _first_epoch(subject: Subject) -> Iterator[Batch]:
    """The training batches of a run's first epoch."""
    return batches(subject.task, subject.training.batch_size, seed=subject.seed, epoch=0)


@torch.no_grad()
def _descend(subject: Subject) -> None:
    """A plain gradient step with the plan's learning rate."""
    for parameter in subject.model.parameters():
        parameter.sub_(subject.training.lr * _grad(parameter))


def _flat_gradient(subject: Subject, batch: Batch) -> Tensor:
    """The gradient of the loss on one batch by all parameters, which stays in their `.grad`."""
    subject.model.zero_grad()
    subject.task.loss(subject.task.outputs(subject.model, batch[0]), batch[1]).backward()
    return torch.cat([_grad(parameter).double().flatten() for parameter in subject.model.parameters()])


def norm_growth_error(subject: Subject, *, steps: int = 20) -> float:
    r"""Largest deviation in percent of the growth of ‖v‖ per step from √(1 + c²), c = η‖∇v‖ / ‖v‖, by filter.

    The model, parametrised with weight norm, takes plain gradient steps with the plan's learning rate.
    """
    raws, worst = [p for p in subject.model.train().parameters() if p.ndim > 1], 0.0
    for batch in islice(_first_epoch(subject), steps):
        _flat_gradient(subject, batch)
        before = [filter_norms(raw.detach().double().flatten(1)) for raw in raws]
        pulls = [subject.training.lr * filter_norms(_grad(raw).double().flatten(1)) for raw in raws]
        _descend(subject)
        after = [filter_norms(raw.detach().double().flatten(1)) for raw in raws]
        for was, pull, now in zip(before, pulls, after, strict=True):
            worst = max(worst, float((now / was / (1 + (pull / was).square()).sqrt() - 1).abs().max()))
    return 100 * worst


def best_rate(subject: Subject, *, octaves: Sequence[float], examples: int | None = None, hold: bool = False) -> float:
    """Octaves from the plan's learning rate to the best one: that with the best last validation score.

    The model is trained from its start at every rate of a grid, in the same order of the examples. The best rate is the
    vertex of the parabola through the best score and its two neighbours; at an end of the grid it is that end.

    Args:
        octaves: the grid, as ascending log2 of the factor of the plan's rate.
        examples: of the training split, from its start; None for all.
        hold: hold norms and sizes of the steps (:func:`gonio.hold_` with `step="fixed"`).
    """
    task = subject.task if examples is None else replace(subject.task, train=_first(subject.task.train, examples))
    sign, scores = 1 if task.metric.direction == "min" else -1, []
    for octave in octaves:
        model = copy.deepcopy(subject.model)
        held = partial(hold_, model, step="fixed") if hold else None
        training = replace(subject.training, lr=subject.training.lr * 2**octave)
        done = fit(model, task, training=training, seed=subject.seed, hold=held)
        scores.append(math.inf if done.diverged else sign * done.curve["val_score"][-1])
    return _lowest(octaves, scores)


def _first(split: Examples, count: int) -> Split:
    if not isinstance(split, Split):
        raise InvalidArgumentError("examples= needs a split of tensors", type(split).__name__, "Leave it out.")
    return Split(split.inputs[:count], split.targets[:count])


def _lowest(places: Sequence[float], values: Sequence[float]) -> float:
    """Where the parabola through the least value and its neighbours is lowest; the place itself without both."""
    at = min(range(len(values)), key=values.__getitem__)
    if at in (0, len(values) - 1) or not all(map(math.isfinite, values[at - 1 : at + 2])):
        return math.nan if math.isinf(values[at]) else float(places[at])
    a, b, _ = np.polyfit(places[at - 1 : at + 2], values[at - 1 : at + 2], 2)
    return float(places[at]) if a <= 0 else float(-b / (2 * a))


def rotation_excess(subject: Subject, *, epochs: int, hold: bool = False) -> float:
    """Percent by which scale-invariant layers turn faster per step than predicted, mean over the layers.

    The model is trained for `epochs` at a constant learning rate with the plan's other settings, and the later half of
    the steps counts; see :func:`gonio.measuring.equilibrium`. With `hold`, norms and sizes of the steps are held, which
    predicts arctan η (:func:`gonio.hold_`).
    """
    invariant = trace(subject.model, training=True).scale_invariant
    trackers: list[Tracker] = []

    def watch(optimizer: Optimizer) -> None:
        if hold:
            hold_(subject.model, optimizer, step="fixed")
        trackers.append(Tracker(subject.model, optimizer=optimizer, figures="training", every=1))

    training = replace(subject.training, epochs=epochs, schedule="constant", warm_up=0.0)
    done = fit(subject.model, subject.task, training=training, seed=subject.seed, hold=watch)
    ratios = [layer.ratio for layer in trackers[0].rotations if layer.layer in invariant and layer.ratio is not None]
    return math.nan if done.diverged or not ratios else 100 * (sum(ratios) / len(ratios) - 1)


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


def _weights(model: nn.Module) -> Iterator[tuple[Any, Tensor]]:
    """Every linear and convolutional layer in order, with its effective weight."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            yield module, module.weight.detach()


MEASURES: Mapping[str, Kind] = {
    "accuracy": Kind(accuracy, "%", worst=0.0, better="max"),
    "accuracy_after": Kind(accuracy_after, "%", worst=0.0, better="max"),
    "angle_bias": Kind(angle_bias, "degrees"),
    "angle_error": Kind(angle_error, "degrees"),
    "angle_spread": Kind(angle_spread, "degrees"),
    "batch_share": Kind(batch_share, "%"),
    "best_rate": Kind(best_rate, "octaves", start=True),
    "bits_per_byte": Kind(bits_per_byte, "bits", worst=8.0, better="min"),
    "calibrated_accuracy": Kind(calibrated_accuracy, "%", worst=0.0, better="max"),
    "curve_roughness": Kind(curve_roughness, "% of the fall"),
    "epochs_to": Kind(epochs_to, "epochs", better="min"),
    "gradient_change": Kind(gradient_change, "%", start=True),
    "hidden_gradients": Kind(hidden_gradients, "%", attacked=True),
    "input_gradient": Kind(input_gradient, "decades"),
    "int8_accuracy": Kind(int8_accuracy, "%", worst=0.0, better="max"),
    "largest_sigma": Kind(largest_sigma, ""),
    "lipschitz_bound": Kind(lipschitz_bound, "decades"),
    "lipschitz_slack": Kind(lipschitz_slack, "decades"),
    "loss_after": Kind(loss_after, "nats"),
    "norm_growth_error": Kind(norm_growth_error, "%", start=True),
    "overfit": Kind(overfit, "%"),
    "penalty_change": Kind(penalty_change, "%"),
    "rectified_deviation": Kind(rectified_deviation, "%", start=True),
    "robust_accuracy": Kind(robust_accuracy, "%", worst=0.0, better="max", attacked=True),
    "rotation_excess": Kind(rotation_excess, "%", start=True),
    "shift_deviation": Kind(shift_deviation, "%"),
    "signal_gain": Kind(signal_gain, "decades", start=True),
    "trains": Kind(trains, "% of runs", worst=0.0, better="max"),
}
