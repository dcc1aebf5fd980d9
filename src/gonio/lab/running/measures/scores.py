"""Scores of trained models and of their learning curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from gonio.errors import InvalidArgumentError
from gonio.lab.plan import Attack
from gonio.lab.running.measures import FinishedRun, Reads, measure
from gonio.lab.running.training import batches, evaluate, fit
from gonio.lab.tasks.task import Batch, Examples
from gonio.recipes import Recipe
from gonio.seeding import derive_seed
from gonio.surgery import calibrate_


def score_of(run: FinishedRun, model: nn.Module | None = None, split: Examples | None = None) -> float:
    """The task's metric on a split, by default the test split; NaN if an output is not finite."""
    found = evaluate(model or run.model, run.task, split or run.task.test)
    return math.nan if found is None else found


def first_epoch(run: FinishedRun) -> Iterator[Batch]:
    """The training batches of a run's first epoch."""
    return batches(run.task, run.training.batch_size, seed=run.seed, epoch=0)


_ACCURACY: Reads = ("%", "max")
_Epochs = Annotated[int, Field(gt=0)]


@measure("%", worst=0.0, better="max", kind="task")
def accuracy(run: FinishedRun) -> float:
    """Accuracy on the test split, at the epoch with the best validation score."""
    return score_of(run)


@measure("% of runs", worst=0.0, better="max", kind="training", reads=_ACCURACY)
def trains(run: FinishedRun, *, least: float = 50.0) -> float:
    """Share of runs that train: 100 if the test accuracy is at least `least` percent, else 0."""
    return 100.0 if score_of(run) >= least else 0.0


@measure("nats", kind="training")
def loss_after(run: FinishedRun, *, epochs: _Epochs) -> float:
    """Mean training loss of the epoch with this number."""
    losses = run.curve["train_loss"]
    if epochs > len(losses):
        raise InvalidArgumentError(f"the loss after {epochs} epochs needs as many", str(len(losses)), "Name fewer.")
    found = losses[epochs - 1]
    return math.inf if found is None else found


@measure("% of the fall")
def curve_roughness(run: FinishedRun) -> float:
    """How unsteady training is: the sum of all rises of the epoch's training loss, over its total fall."""
    losses = [loss for loss in run.curve["train_loss"] if loss is not None]
    rises = sum(max(0.0, after - before) for before, after in pairwise(losses))
    return 100 * rises / max(losses[0] - min(losses), 1e-12)


@measure("%", worst=0.0, better="max", kind="training", reads=_ACCURACY)
def calibrated_accuracy(run: FinishedRun, *, average: Literal["moving", "batches"] = "moving") -> float:
    """Accuracy with statistics of the normalisation that are `moving` averages or averages over `batches`."""
    if average == "batches":
        standardised = [run.task.outputs(nn.Identity(), inputs) for inputs, _ in first_epoch(run)]
        calibrate_(run.model, standardised, variance="mean")
    return score_of(run)


@measure("%", worst=0.0, better="max", attacked=True)
def robust_accuracy(run: FinishedRun, *, attack: Literal[Attack, "worst"] = "worst") -> float:
    """Accuracy on attacked test examples; `worst` counts an example as correct only if no attack misled the model."""
    return float(run.robustness[attack])


@measure("%", attacked=True)
def hidden_gradients(run: FinishedRun) -> float:
    """Points by which PGD is weaker than noise, transferred examples or PGD on smoothed gradients: hidden gradients.

    It is 0 where PGD is the most harmful of them, and then the accuracy under PGD can be taken at its word.
    """
    others = (run.robustness[name] for name in ("noise", "transfer", "smoothed") if name in run.robustness)
    return max(0.0, float(run.robustness["pgd"]) - min(others))


@measure("%", worst=0.0, better="max", kind="training", reads=_ACCURACY)
def accuracy_after(run: FinishedRun, *, epochs: _Epochs, recipe: Mapping[str, Any] | None = None) -> float:
    """Accuracy on the test split after the trained model was changed by a recipe and trained for `epochs` more.

    The second training has the learning rate, decay and schedule of the first one, and chooses its own best epoch.
    """
    changed = Recipe.from_dict({**(recipe or {}), "name": "later"})
    applied = changed.apply_(run.model, seed=run.seed)
    training, seed = replace(run.training, epochs=epochs), derive_seed(run.seed, "later")
    done = fit(run.model, run.task, training=training, seed=seed, penalty=applied.penalty, hold=applied.hold_)
    if done.diverged or done.state is None:
        return math.nan
    run.model.load_state_dict(done.state)
    return score_of(run)


@measure("bits", worst=8.0, better="min", kind="task")
def bits_per_byte(run: FinishedRun) -> float:
    """Bits per byte of the text on the test split, at the epoch with the best validation score."""
    return score_of(run)


@measure("squared distance", better="min", kind="task")
def frechet_distance(run: FinishedRun) -> float:
    """Fréchet distance of generated to real images of the test split, at the epoch with the best validation score."""
    return score_of(run)


@measure("nats", better="min", kind="task")
def negative_elbo(run: FinishedRun) -> float:
    """Negative evidence lower bound per image of the test split, at the epoch with the best validation score."""
    return score_of(run)


@measure("%", reads=_ACCURACY)
def overfit(run: FinishedRun) -> float:
    """Points by which the accuracy on the training split exceeds that on the test split."""
    return score_of(run, split=run.task.train) - score_of(run)
