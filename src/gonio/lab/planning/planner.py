"""From the arguments of a command to a plan; every mistake is found before anything is trained."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gonio.errors import GonioError, InvalidArgumentError, UnmatchedRuleError, first_line, with_article
from gonio.lab.plan import (
    TRAINING_RANGES,
    AttackConfig,
    RecipeEntry,
    StudyPlan,
    TrainingConfig,
    Tuning,
    installed_versions,
    seeds_of,
)
from gonio.lab.planning.checks import check_first_steps, notes_on_data, paired
from gonio.lab.running.engines.local import call_apart
from gonio.lab.running.scripts import probe_script
from gonio.lab.running.training import autocast
from gonio.lab.running.tuning import require_optuna
from gonio.lab.tasks.built_in import resolve as resolve_task
from gonio.lab.tasks.task import Split, Task
from gonio.models import resolve as resolve_model
from gonio.models.by_name import code_digests, is_user_code
from gonio.optim.named import check_settings
from gonio.recipes import BASELINE, Recipe
from gonio.seeding import state_kept

# One per seed system, in the order of the systems.
BUILT_IN_RECIPES = ("orthogonal-init", "switchable-norm", "decoupled-tanh", "self-orthogonality", "scale-shift")
_UNSTEADY = (
    "In evaluation mode the model gives other outputs when it is called again with the same inputs: it draws random "
    "numbers or keeps a state, and its scores have that noise."
)
_UNDEFINED = (
    "The metric {metric!r} is {found} for the outputs of the untrained model and for constant ones: a run in which it "
    "is never finite counts as diverged."
)
_SCRIPT_NOTE = "Training and score are those of a script of the user's own; equal budgets are the script's to keep."


def make_plan(
    recipes: Sequence[str | Recipe] | None = None,
    *,
    task: str = "digits",
    model: str | None = None,
    seeds: int | Sequence[int] = 8,
    training: TrainingConfig | Mapping[str, Any] | None = None,
    sesoi: float | None = None,
    tune: int = 0,
    robust: bool = False,
    device: str = "cpu",
    workers: int | None = None,
    command: str = "gonio compare",
) -> StudyPlan:
    """Plan a comparison: recipes × seeds on one task and model, the baseline included.

    Every recipe is planned on the model here, so a rule that matches no layer is an error before the first run.

    Args:
        recipes: built-in names, files, or recipes, without the baseline, which is always the first. None: the task's
            own choice, or one per method family; a note names those that match no layer and are left out.
        task: see :func:`gonio.lab.tasks.resolve`.
        model: see :func:`gonio.models.resolve`; None is the task's own.
        seeds: how many (0, 1, …), or which.
        training: None is the task's own; a mapping holds values in place of the task's own.
        sesoi: smallest effect of interest in the metric's unit; None is the task's own.
        tune: tuning trials of every recipe, the baseline included, over its strengths and the learning rate.
        robust: attack the trained models, as the task configures it.
        device: kind of device on which the runs compute: `cpu`, `cuda` or `mps`.
        workers: processes that load the items of data sets in each run; None is the task's own number.
        command: the command line that reproduces the study, for the record.

    Raises:
        InvalidArgumentError: no seeds, a name twice, an invalid training.
        UnmatchedRuleError: a rule matches no layer of the model; names rule, file and line.
        UnknownNameError: no such task, model or recipe.

    Example:
        >>> plan = gonio.lab.make_plan(["orthogonal-init"], seeds=3)
        >>> len(plan.grid), [recipe.name for recipe in plan.recipes]
        (6, ['baseline', 'orthogonal-init'])
    """
    data, found = resolve_task(task), seeds_of(seeds)
    spec = model or data.model
    chosen = training if isinstance(training, TrainingConfig) else replace(data.training, **training or {})
    check_training(chosen, data, device=device)
    workers = data.workers if workers is None else workers
    _check_paired(data, chosen, workers)
    _check_further(data, robust=robust, tune=tune)
    with state_kept():  # factories draw; the caller's generator keeps its state
        factory = resolve_model(spec)
        net = factory(**data.sizes)
        outputs, unsteady = _checked_outputs(net, spec, data)
    unusual = check_first_steps(factory, data, chosen if device == "cpu" else replace(chosen, precision="fp32"))
    chance = _chance(data, outputs)
    fitting, left_out = _chosen(recipes, data, net)
    entries = [RecipeEntry.of(recipe) for recipe in (Recipe(BASELINE), *fitting)]
    remarks = [*left_out, *_remarks(entries)]
    plan = StudyPlan(
        task=task,
        model=spec,
        recipes=tuple(entries),
        seeds=found,
        training=chosen,
        metric=data.metric.name,
        direction=data.metric.direction,
        unit=data.metric.unit,
        splits={name: len(split) for name, split in data.splits.items()},
        data=_digest_of(data),
        sesoi=_positive("sesoi", data.sesoi if sesoi is None else sesoi),
        worst=data.metric.worst,
        code=code_digests(task, spec),
        notes=(*data.notes, *notes_on_data(data), *unsteady, *unusual, *remarks, *_notes_on(device)),
        versions=installed_versions(),
        command=command,
        tuning=Tuning(trials=tune) if tune else None,
        threat=data.threat if robust else None,
        chance=chance,
        device=device,
        metrics={metric.name: metric.unit for metric in data.metrics},
        workers=workers,
    )
    return replace(plan, notes=(*plan.notes, *_own_trainings(plan)))


def make_script_plan(
    recipes: Sequence[str | Recipe] | None = None,
    *,
    script: str,
    seeds: int | Sequence[int] = 8,
    metric: str = "score",
    direction: str = "max",
    unit: str = "",
    sesoi: float = 0.0,
    epsilon: float | None = None,
    device: str = "cpu",
    command: str = "gonio compare",
) -> StudyPlan:
    """Plan a comparison that calls `script` for every run.

    The script runs here up to its `run.apply_`, in a process of its own, and every recipe is planned on the
    model that it passes: a rule that matches no layer is an error before the first run.

    Args:
        recipes: built-in names, files, or recipes. None: one per method family; those that match no layer of the
            script's model are left out with a note.
        script: `file.py:function`; the function is called with a :class:`Run` and gives the score.
        metric, unit: of the score. direction: `max` if a larger score is better, else `min`.
        sesoi: smallest effect of interest in the score's unit; 0: none, so no effect is called too small.
        epsilon: largest change of an input number by attacks on the model that the script hands over; None: none.
        device: kind of device that the script finds in `run.device`.

    Raises:
        InvalidArgumentError: no Python file, no seeds, an unknown direction, or an exception of the script.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "fit_line.py"
        >>> _ = path.write_text('''
        ... import torch
        ... def train(run):
        ...     model = torch.nn.Linear(4, 2)
        ...     run.apply_(model)
        ...     return float(model.weight.sum())
        ... ''')
        >>> plan = gonio.lab.make_script_plan(["orthogonal-init"], script=f"{path}:train", seeds=2)
        >>> plan.scripted, plan.metric, len(plan.grid)
        (True, 'score', 4)
    """
    if not is_user_code(script):
        raise InvalidArgumentError("a script is file.py:function", repr(script), "Name a Python file.")
    if direction not in ("max", "min"):
        raise InvalidArgumentError("a score's direction is 'max' or 'min'", repr(direction), "Use one of them.")
    _require(0 <= sesoi < math.inf, "sesoi must be 0 or a positive number", sesoi, "Give a larger one.")
    loaded = _loaded(BUILT_IN_RECIPES if recipes is None else recipes)
    if own := [recipe.name for recipe in loaded if recipe.optimizer is not None]:
        named, do = f"{', '.join(own)}, which names one", "Leave the recipe out, or its optimizer."
        raise InvalidArgumentError("a script builds its own optimizer", named, do)
    code = code_digests(script)  # also checks that there is such a file, which is not run
    unfit = _unfit(script, loaded, device)
    if unfit and recipes is not None:
        raise _script_error(script, "; ".join(unfit.values()))
    fitting = [recipe for recipe in loaded if recipe.name not in unfit]
    entries = [RecipeEntry.of(recipe) for recipe in (Recipe(BASELINE), *fitting)]
    return StudyPlan(
        task=script,
        model="",
        recipes=tuple(entries),
        seeds=seeds_of(seeds),
        training=None,
        metric=metric,
        direction=direction,
        unit=unit,
        splits={},
        data="",
        sesoi=sesoi,
        code=code,
        notes=(_SCRIPT_NOTE, *map(_left_out, unfit), *_alike(entries)),
        versions=installed_versions(),
        command=command,
        threat=None if epsilon is None else AttackConfig(epsilon=_positive("epsilon", epsilon)),
        device=device,
    )


def _alike(entries: Sequence[RecipeEntry]) -> list[str]:
    """A note on each recipe that does what the baseline or an earlier recipe does."""
    rules = [{**entry.content, "name": "", "source": "", "description": ""} for entry in entries]
    firsts = [(entry.name, entries[rules.index(own)].name) for entry, own in zip(entries, rules, strict=True)]
    return [
        f"{name} has no rules: it is the baseline under another name, and Holm's correction counts it."
        if first == BASELINE
        else f"{name} has the rules of {first}: it is the same recipe, and Holm's correction counts both."
        for name, first in firsts
        if name != first
    ]


def _remarks(entries: Sequence[RecipeEntry]) -> list[str]:
    """A note on each recipe that is another one again, or changes more than one thing."""
    confounded = [
        f"{each.name} changes several things at once ({', '.join(each.changes)}): its effect belongs to all of them "
        "together."
        for each in entries
        if len(each.changes) > 1
    ]
    return [*_alike(entries), *confounded]


def _own_trainings(plan: StudyPlan) -> list[str]:
    """A note on each recipe that names its optimizer."""
    own = [(entry.name, plan.training_of(entry)) for entry in plan.recipes if entry.content.get("optimizer")]
    usual = f"{plan.trained.optimizer} with {plan.trained.lr:g}"
    return [
        f"{name} is trained by {each.optimizer} with a learning rate of {each.lr:g}, in place of {usual}."
        for name, each in own
    ]


def _loaded(recipes: Sequence[str | Recipe]) -> list[Recipe]:
    """The recipes, whose names must be unique."""
    loaded = [recipe if isinstance(recipe, Recipe) else Recipe.load(recipe) for recipe in recipes]
    names = [BASELINE, *(recipe.name for recipe in loaded)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError(
            "each recipe of a comparison needs its own name, and none may be 'baseline'",
            f"{', '.join(twice)} more than once",
            "Rename one of them in its file.",
        )
    return loaded


def _chosen(recipes: Sequence[str | Recipe] | None, task: Task, model: nn.Module) -> tuple[list[Recipe], list[str]]:
    """The recipes, each of which matches the model, and a note on each default recipe that does not."""
    fitting, notes = [], []
    for recipe in _loaded(task.recipes or BUILT_IN_RECIPES if recipes is None else recipes):
        try:
            recipe.plan(model)
            fitting.append(recipe)
        except UnmatchedRuleError:
            if recipes is not None:
                raise
            notes.append(_left_out(recipe.name))
    return fitting, notes


def _unfit(script: str, recipes: Sequence[Recipe], device: str) -> dict[str, str]:
    """The recipes with a rule that matches no layer of the script's model, with the reason."""
    try:
        found = call_apart(probe_script, script, [recipe.to_dict() for recipe in recipes], device)
    except ChildProcessError as error:
        found = {"error": str(error)}
    if "error" in found:
        raise _script_error(script, str(found["error"]))
    return dict(found["unfit"])


def _script_error(script: str, found: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{script!r} must reach run.apply_(model), and every recipe must fit that model",
        found,
        "Correct the script, or name recipes that fit.",
    )


def _left_out(name: str) -> str:
    return f"{name} is left out: one of its rules matches no layer of this model."


def _checked_outputs(model: nn.Module, spec: str, task: Task) -> tuple[Tensor, list[str]]:
    """The outputs for two examples, after a check of the loss and the metrics, and notes on what is unusual about them.

    Wrong shapes would fail every run.
    """
    inputs, targets = task.train.take(range(min(2, len(task.train))))
    try:
        with torch.no_grad():
            given: list[Any] = [task.outputs(model.eval(), inputs.clone()) for _ in range(2)]
            outputs, again = given
            if not isinstance(outputs, Tensor):
                needs, do = f"the model {spec!r} must return one tensor", "Return that of its outputs which is judged."
                raise InvalidArgumentError(needs, with_article(type(outputs).__name__), do)
            _check_pairs("the loss", task.loss, outputs, targets)
            task.loss(outputs, targets.clone())
    except GonioError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"the model {spec!r} must take the inputs of the task {task.name!r}, of shape {tuple(inputs.shape)} and "
            f"{inputs.dtype}, and its outputs must fit the task's loss",
            f"{type(error).__name__}: {error}".rstrip("."),
            "Choose a model for such inputs and targets.",
        ) from error
    notes = [] if torch.allclose(outputs, again, equal_nan=True) else [_UNSTEADY]
    return outputs, [*notes, *_check_metrics(task, outputs)]


def _check_pairs(name: str, function: Callable[[Tensor, Tensor], Any], outputs: Tensor, targets: Tensor) -> None:
    """Whether an axis of one entry, which outputs or targets have alone, changes what is computed.

    Then torch broadcasts the difference of (N, 1) and (N,) to (N, N): each output is compared with every target.
    """
    if targets.shape not in ((*outputs.shape, 1), outputs.shape[:-1]) or outputs.numel() != targets.numel():
        return
    known = torch.arange(min(len(targets), 32)) % 2  # outputs that equal their targets
    targets = known.view(-1, *(1,) * (targets.ndim - 1)).expand(len(known), *targets.shape[1:]).to(targets)
    outputs = targets.reshape(len(known), *outputs.shape[1:]).to(outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the losses of torch warn of these shapes
        try:
            given, alike = (
                float(function(x.clone(), targets.clone())) for x in (outputs, outputs.reshape(targets.shape))
            )
        except Exception:  # one of the two shapes is none for it
            return
    if math.isfinite(given) and math.isfinite(alike) and not math.isclose(given, alike, rel_tol=1e-3, abs_tol=1e-6):
        found = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}, which torch "
        needs, do = f"{name} compares each output with its own target", "Give the targets the shape of the outputs."
        raise InvalidArgumentError(needs, f"{found}broadcasts against each other", do)


def _check_metrics(task: Task, outputs: Tensor) -> list[str]:
    """Whether each metric gives a number, with the outputs of two examples again and again for the whole test split.

    Returns a note if the metric that decides gives one that is not finite, also for constant outputs: it may be
    undefined for these only, or for all.
    """
    notes: list[str] = []
    try:
        targets = task.test.targets
    except InvalidArgumentError:  # a data set that must be read for them
        targets = task.test.take(range(len(outputs)))[1]
    rows = outputs[torch.arange(len(targets)) % len(outputs)]
    for metric in (task.metric, *task.metrics):
        _check_pairs(f"the metric {metric.name!r}", metric.value, rows, targets)
        try:
            found = metric.value(rows, targets)
        except GonioError:
            raise
        except Exception:  # it may be undefined for so few different outputs
            continue
        if metric is task.metric and not math.isfinite(found) and bool(rows.isfinite().all()):
            notes += [_UNDEFINED.format(metric=metric.name, found=found)] if _chance(task, outputs) is None else []
    return notes


def _digest_of(task: Task) -> str:
    """The digest of the task's data, which must be the same again: other processes read them too."""
    found = task.digest()
    if not all(isinstance(split, Split) for split in task.splits.values()) and task.digest() != found:
        needs = f"the examples of {task.name!r} must be the same each time that they are read"
        do = "Draw random numbers from torch's, NumPy's or Python's global generator alone, which are seeded."
        raise InvalidArgumentError(needs, "other ones when they were read again with the same seed", do)
    return found


def _chance(task: Task, outputs: Tensor) -> float | None:
    """Score of the best constant prediction on the test split: equal outputs, or the most frequent class.

    None if the metric cannot be computed for constant outputs.
    """
    constants = [torch.zeros_like(outputs[0])]
    try:
        targets = task.test.targets
    except InvalidArgumentError:  # a data set that must be read for them
        return None
    if targets.ndim == 1 and not targets.is_floating_point() and constants[0].ndim == 1:
        constants.append(F.one_hot(targets.long().mode().values % len(constants[0]), len(constants[0])).to(outputs))
    try:
        count = len(targets)
        scores = [task.metric.value(c.expand(count, *c.shape), targets) for c in constants]
    except Exception:  # a user's metric may reject constant outputs
        return None
    known = [score for score in scores if math.isfinite(score)]
    return (max if task.metric.direction == "max" else min)(known, default=None)


def _check_further(task: Task, *, robust: bool, tune: int) -> None:
    """Whether the models can be attacked and the recipes tuned, if that is wanted."""
    if robust and task.threat is None:
        raise InvalidArgumentError(
            f"--robust needs a task whose inputs have small disturbances; {task.name!r} does not configure any",
            "a task without threat=",
            "Leave --robust out, or give the Task a gonio.lab.AttackConfig.",
        )
    if tune:
        _positive("the number of trials", tune)
        require_optuna()


def check_training(training: TrainingConfig, task: Task, *, device: str = "cpu") -> None:
    """Refuse a training that cannot be done on this task and device.

    Raises:
        InvalidArgumentError: names the setting.
    """
    check_settings(vars(training), TRAINING_RANGES)
    warm, parts = training.warm_up, training.accumulate
    _require(warm < training.epochs, f"warm_up must be shorter than the {training.epochs} epochs", warm)
    _require(not (warm and training.schedule == "one-cycle"), "one-cycle warms up by itself", f"warm_up={warm:g}")
    size = training.batch_size
    _require(parts == 1 or size >= 2 * parts, "accumulate needs two examples in each part",
             f"{parts} parts of {size}")  # fmt: skip
    most = f"batch_size must be at most the {len(task.train)} training examples of {task.name!r}"
    _require(size <= len(task.train), most, size, "Choose a smaller one.")
    _require(not training.label_smoothing or task.loss is F.cross_entropy,
             "label_smoothing needs a task whose loss is cross_entropy", task.name, "Leave it out.")  # fmt: skip
    _check_precision(device, training.precision)


def _require(holds: bool, problem: str, found: object, do: str = "Give another value.") -> None:
    if not holds:
        raise InvalidArgumentError(problem, str(found) if isinstance(found, str) and " " in found else repr(found), do)


def _check_precision(device: str, precision: str) -> None:
    """Compute a small convolution and its gradient, which is the only way to know whether the device can."""
    if precision == "fp32":
        return
    try:
        layer = nn.Conv2d(2, 2, 3).to(device)
        with autocast(torch.device(device), precision):
            layer(torch.ones(1, 2, 4, 4, device=device)).sum().backward()
    except Exception as error:  # a backend may raise anything
        found = f"{device}: {first_line(error)}"
        needs = f"precision {precision} needs a device that computes in it"
        raise InvalidArgumentError(needs, found, "Choose bf16 or fp32, or another --device.") from error


def _check_paired(task: Task, training: TrainingConfig, workers: int) -> None:
    if not paired(task.train, training.batch_size, augment=task.augment, workers=workers):
        raise InvalidArgumentError(
            f"the training examples of {task.name!r} must be the same for all recipes of a seed",
            "another first batch when it was read again with the same seed",
            "Draw random numbers from torch's, NumPy's or Python's global generator alone, which are seeded."
            if task.augment is None
            else "Draw random numbers from the generator that augment= is given alone.",
        )


def _notes_on(device: str) -> tuple[str, ...]:
    if device == "cpu":
        return ()
    return (
        f"The runs computed on {device}. Initial weights, the order of the examples and their augmentation are drawn "
        "on the CPU and are bit-equal on every device; sums are not, so scores may differ in their last digits from "
        "those of another device, and between two runs of an operation that has no deterministic form.",
    )


def _positive(name: str, value: float) -> float:
    _require(0 < value < math.inf, f"{name} must be a positive number", value, "Give a larger one.")
    return value
