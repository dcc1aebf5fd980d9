"""What would fail or falsify every run, found before the first one: in the data, and in the first steps of a run.

The model is built twice from one seed and once from another, and the first two are trained for two steps. Runs of one
seed can be compared only if all of that is the same twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Subset

from gonio.errors import GonioError, InvalidArgumentError, first_line, with_article
from gonio.execution import leaves_of, one_thread
from gonio.lab.plan import TrainingConfig
from gonio.lab.running.training import TrainingStep, batches
from gonio.lab.tasks.task import Augment, Batch, Examples, ItemSet, Split, Task, kept_generators, seed_everything
from gonio.models.by_name import ModelFactory
from gonio.seeding import derive_seed

_STEPS = 2  # the second one finds a model that keeps the graph of the first
_SAME_STARTS = (
    "Every seed starts with the same weights, which the model's factory does not draw anew: seeds differ in the order "
    "of the examples and in what is drawn during training alone."
)


def check_first_steps(factory: ModelFactory, task: Task, training: TrainingConfig) -> list[str]:
    """Notes on what is unusual about the first steps of the baseline.

    Raises:
        InvalidArgumentError: no run could be trained, two runs of one seed would differ, or a tensor that should be
            trained would not be.
    """
    size = min(training.batch_size, 2 * training.accumulate)
    with kept_generators(), one_thread():
        batch = next(batches(task, size, seed=0, epoch=0, training=replace(training, batch_size=size)))
        model, again, other = (_built(factory, task, seed) for seed in (0, 0, 1))
        _check_new(model, again, factory.spec)
        notes = [_SAME_STARTS] if _equal(model, other) else []
        same = _equal(model, again)
        _check_loss(other, task, batch)
        del other
        if not same or _course(model, task, training, batch) != _course(again, task, training, batch):
            lost = [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]
            if lost and not same:
                needs = f"a new model of {factory.spec!r} has finite weights"
                raise InvalidArgumentError(needs, f"NaN or infinity in {lost[0]}", "Correct its initialisation.")
            found = "another loss after two steps with the same seed" if same else "other weights with the same seed"
            do = "Draw random numbers from torch's, NumPy's or Python's global generator alone, which are seeded."
            raise InvalidArgumentError(f"two runs of {factory.spec!r} with one seed must be equal", found, do)
    if len(batch[1]) != size:
        found = f"{len(batch[1])} examples where {size} were asked for"
        notes.append(f"The loader of the training split does not follow the batch size: it gives {found}.")
    return notes


def _built(factory: ModelFactory, task: Task, seed: int) -> nn.Module:
    seed_everything(derive_seed(seed, "model"))
    return factory(**task.sizes)


def _check_new(model: nn.Module, again: nn.Module, spec: str) -> None:
    """Whether a factory builds a new model at each call, with parameters to be trained."""
    held = list(itertools.chain(model.parameters(), model.buffers()))
    if any(map(is_lazy, held)):
        lazy = next(type(m).__name__ for m in model.modules() if hasattr(m, "has_uninitialized_params"))
        needs = f"the parameters of {spec!r} must have their sizes before recipes and optimizers take them"
        raise InvalidArgumentError(needs, with_article(lazy), "Run the model on an example in its factory.")
    if shared := set(map(id, model.parameters())).intersection(map(id, again.parameters())):
        needs, found = f"{spec!r} must build a new model at each call", f"{len(shared)} parameters of the first one"
        raise InvalidArgumentError(needs, f"{found} in the second", "Build the layers inside of the function.")
    if not any(each.requires_grad for each in model.parameters()):
        found = "parameters that are all frozen" if held else "none"
        needs = f"a study trains the parameters of {spec!r}"
        raise InvalidArgumentError(needs, found, "Set requires_grad of those that are to be trained.")


def _equal(model: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters of two models have the same values."""
    pairs = list(zip(model.parameters(), other.parameters(), strict=False))
    return len(pairs) == len(list(other.parameters())) and all(torch.equal(a, b) for a, b in pairs)


def _check_loss(model: nn.Module, task: Task, batch: Batch) -> None:
    """Whether the loss is one number that depends on the model's parameters, and on nothing else that is to be trained.

    Layers in a Python list, and parameters of the loss, are known to no optimizer.
    """
    try:
        loss: object = task.loss(task.outputs(model.train(), batch[0].clone()), batch[1].clone())
    except Exception as error:
        raise _untrainable(batch, error) from error
    if not isinstance(loss, Tensor) or loss.ndim:
        what = with_article(type(loss).__name__)
        found = f"{what} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else what
        needs, do = "a loss is a tensor with one number, of shape ()", "Return the mean over the examples."
        raise InvalidArgumentError(needs, found, do)
    if not loss.requires_grad:
        do = "Compute it from the model's outputs by differentiable operations, without detach, item or argmax."
        raise InvalidArgumentError("a loss must have a gradient", f"a loss of {float(loss):g} without one", do)
    known = set(map(id, model.parameters()))
    if unknown := [each for each in leaves_of(loss) if id(each) not in known]:
        shapes = ", ".join(str(tuple(each.shape)) for each in unknown[:6])
        needs = "what requires a gradient must be a parameter of the model, or no optimizer trains it"
        do = "Hold layers in an nn.ModuleList and parameters of a loss in the model; freeze a fixed teacher."
        raise InvalidArgumentError(needs, f"other tensors of shapes {shapes}", do)


def _course(model: nn.Module, task: Task, training: TrainingConfig, batch: Batch) -> list[str]:
    """The losses of the steps as text, in which NaN equals itself, and that of the trained model."""
    seed_everything(derive_seed(0, "train"))
    try:
        step = TrainingStep(model.train(), task, training)
        losses = [step(*(x.clone() for x in batch))[0] for _ in range(_STEPS)]
        with torch.no_grad():
            return [*map(repr, losses), repr(float(task.loss(task.outputs(model, batch[0].clone()), batch[1].clone())))]
    except GonioError:
        raise
    except Exception as error:
        raise _untrainable(batch, error) from error


def _untrainable(batch: Batch, error: Exception) -> InvalidArgumentError:
    needs = f"the baseline must train on a batch of {len(batch[1])}"
    return InvalidArgumentError(
        needs, first_line(error, kind=True).rstrip("."), "Correct the model, the loss or the training."
    )


# --- the data --------------------------------------------------------------------------------------------


def paired(examples: Examples, size: int, *, augment: Augment | None = None, workers: int = 0) -> bool:
    """Whether two readings of the first batch with one seed are equal, as a paired comparison needs it."""
    first, again = (
        next(examples.shuffled(size, seed=0, epoch=0, smallest=1, augment=augment, workers=workers)) for _ in range(2)
    )
    both = zip(first, again, strict=True)
    return all(a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in both)


def notes_on_data(task: Task) -> list[str]:
    """A note for each split with numbers that are not finite, and for each two splits with equal examples.

    Tensors in memory are equal if all their numbers are; items of data sets, if they are the same items of one object.
    """
    splits = {name: split for name, split in task.splits.items() if isinstance(split, (Split, ItemSet))}
    notes = []
    for name, split in splits.items():
        if isinstance(split, Split) and (count := int(_not_finite(split.inputs, split.targets).sum())):
            notes.append(f"{count:,} of the {len(split):,} examples of the {name} split contain NaN or infinity.")
    keys = {name: _keys(split) for name, split in splits.items()}
    for (first, held), (second, others) in itertools.combinations(keys.items(), 2):
        known = set(held)
        if count := sum(key in known for key in others):
            notes.append(
                f"{count:,} of the {len(others):,} examples of the {second} split are examples of the {first} split "
                "too, so its scores are partly those of examples that are known."
            )
    return notes


def _not_finite(*tensors: Tensor) -> Tensor:
    """Whether each example has a number that is not finite."""
    return torch.stack([~torch.isfinite(_rows(x)).all(1) for x in tensors]).any(0)


def _rows(x: Tensor) -> Tensor:
    return x.unsqueeze(1).flatten(1).contiguous()


def _keys(split: Examples) -> list[Hashable]:
    """What equal examples have in common."""
    if isinstance(split, ItemSet):
        return _origins(split.dataset)
    return [hash(row.tobytes()) for row in _rows(split.inputs).view(torch.uint8).numpy()]


def _origins(dataset: Any) -> list[Hashable]:
    """The object and the index of each item, through subsets of subsets."""
    if type(dataset) is not Subset:
        return [(id(dataset), index) for index in range(len(dataset))]
    below = _origins(dataset.dataset)
    return [below[int(index)] for index in dataset.indices]
