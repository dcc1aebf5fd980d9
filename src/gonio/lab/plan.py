"""The plan of a comparison: everything that a result depends on, fixed and hashed before the first run."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import ConfigDict, Field, TypeAdapter
from torch import nn

from gonio.errors import InvalidArgumentError, PlanChangedError
from gonio.messages import counted
from gonio.models.by_name import code_digest
from gonio.models.by_name import resolve as resolve_model
from gonio.optim.named import NOT_NEGATIVE, OPTIMIZERS, POSITIVE, RANGES, SHARE, Range, arguments_of, one_of
from gonio.recipes import Recipe
from gonio.recipes.catalogue import TRAINING, VERBS
from gonio.seeding import derive_seed

TUNING_SEED, ATTACK_SEED = 1_000_003, 1_000_007  # no run of a study may use them
_MOST_SEEDS, _LARGEST_SEED = 100_000, 2**62  # the database stores 64-bit integers
Attack = Literal["noise", "transfer", "fgsm", "pgd", "smoothed"]
ATTACKS: tuple[Attack, ...] = get_args(Attack)  # of each trained model, if it is attacked
# Fields that older plans lack. At these values they do not enter the hash.
_LATER: dict[str, Any] = {"self_test": False, "tuning": None, "threat": None, "measure": None}
_LATER |= {"device": "cpu", "metrics": {}}
_FIRST_OF_TRAINING = ("epochs", "batch_size", "lr", "optimizer", "momentum", "weight_decay")
_ALWAYS = object()
adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)  # the validator of a type, made once
CLOSED = ConfigDict(extra="forbid")  # of records that are read from a file: an unknown key is an error
# No result depends on these fields.
_UNHASHED = ("notes", "versions", "command", "history", "chance", "workers")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How every run is trained, whatever its recipe, unless that names an optimizer.

    Attributes:
        batch_size: examples per step of the optimizer.
        lr: peak learning rate; with `muon` that of matrices.
        optimizer: a name of :mod:`gonio.optim.named`: `sgd` has Nesterov momentum, `muon` is :class:`gonio.optim.Muon`.
        momentum: of `sgd` and `muon`.
        schedule: of the learning rate, step by step: `cosine` (a half cosine to 0), `constant`, `step` (a tenth of it
            after half of the steps, a hundredth after three quarters) or `one-cycle` (up along a half cosine from a
            25th in the first 30 % of the steps, then down to nearly 0; momentum stays as it is).
        warm_up: epochs in which the rate first rises from a hundredth, linearly.
        decay: what weight decay shrinks: `all` parameters, or `weights` without biases, norms and tables
            (:func:`gonio.param_groups`); with `muon` always `weights`.
        clip: largest norm of the gradient of all parameters; None: unlimited.
        label_smoothing: probability that is spread over all classes.
        ema: decay of a moving average of the parameters, which is judged in place of them; 0: none.
        precision: `fp32`, or autocast to `bf16` or `fp16`, the latter with a scaled loss.
        accumulate: parts in which a batch is processed, one after the other; their gradients are added.
        betas: of `adamw`, and of what `muon` trains by AdamW; None: the optimizer's own.
        others_factor: with `muon`, the learning rate of what is no matrix over `lr`; None: 0.015.
        channels_last: whether the filters of two-dimensional convolutions, and with them the images between layers,
            are stored with the channels of a pixel side by side; it is often faster, and only rounding differs.
    """

    __pydantic_config__ = CLOSED

    epochs: int
    batch_size: int
    lr: float
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    warm_up: float = 0.0
    decay: str = "all"
    clip: float | None = None
    label_smoothing: float = 0.0
    ema: float = 0.0
    precision: str = "fp32"
    accumulate: int = 1
    betas: tuple[float, float] | None = None
    others_factor: float | None = None
    channels_last: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The settings as data, without the newer ones that have their default: as an older gonio wrote them."""
        older = {each.name: each.default for each in fields(self) if each.name not in _FIRST_OF_TRAINING}
        return {name: value for name, value in asdict(self).items() if value != older.get(name, _ALWAYS)}

    def __str__(self) -> str:
        """In words, e.g. `4 epochs, batch size 8, sgd (learning rate 0.1 with cosine decay, …)`."""
        momentum = f", momentum {self.momentum:g}" if "momentum" in arguments_of(self.optimizer) else ""
        rate = {"cosine": "cosine decay", "constant": "no decay", "step": "step decay", "one-cycle": "one cycle"}
        warm_up = f" after {self.warm_up:g} epochs of warm-up" if self.warm_up else ""
        sparing = " of weights alone" if self.decay == "weights" else ""
        further = [
            (self.clip is not None, f"gradients clipped at norm {self.clip}"),
            (self.label_smoothing, f"label smoothing {self.label_smoothing:g}"),
            (self.ema, f"moving average of the parameters with decay {self.ema:g}"),
            (self.precision != "fp32", f"autocast to {self.precision}"),
            (self.accumulate > 1, f"each batch in {self.accumulate} parts"),
            (self.betas is not None, f"betas {self.betas}"),
            (self.others_factor is not None, f"{self.others_factor} of the learning rate for what is no matrix"),
            (self.channels_last, "channels last"),
        ]
        return (
            f"{counted(self.epochs, 'epoch')}, batch size {self.batch_size}, {self.optimizer} "
            f"(learning rate {self.lr:g} with {rate.get(self.schedule, self.schedule)}{warm_up}{momentum}, "
            f"weight decay {self.weight_decay:g}{sparing})" + "".join(f", {text}" for used, text in further if used)
        )


SCHEDULES = ("cosine", "constant", "step", "one-cycle")
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WHOLE: Range = ("a positive whole number", lambda value: type(value) is int and value > 0)
# What the settings of a training must be; those of its optimizer are known there.
TRAINING_RANGES: Mapping[str, Range] = {
    **RANGES,
    "epochs": _WHOLE,
    "batch_size": _WHOLE,
    "accumulate": _WHOLE,
    "clip": POSITIVE,
    "warm_up": NOT_NEGATIVE,
    "label_smoothing": SHARE,
    "ema": SHARE,
    "optimizer": one_of(tuple(OPTIMIZERS)),
    "schedule": one_of(SCHEDULES),
    "precision": one_of(tuple(PRECISIONS)),
}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How every recipe, the baseline included, is tuned before the runs that are compared.

    Attributes:
        trials: training runs per recipe; the first uses the default values.
        seed: of every trial; no run of the study uses it, so a lucky choice shows in the comparison.
        repeats: training runs of each trial, with the seeds from `seed` on; their mean counts.
        rate_factor: the learning rate is searched between its default divided and multiplied by this.
        strength_factor: the same for each strength.
        sampler: how trials are proposed.
    """

    __pydantic_config__ = CLOSED

    trials: int
    seed: int = TUNING_SEED
    rate_factor: float = 8.0
    strength_factor: float = 30.0
    sampler: str = "tpe"
    repeats: int = 1


@dataclass(frozen=True, kw_only=True)
class AttackConfig:
    r"""Attacks on each trained model (`--robust`): :math:`\|x' - x\|_\infty \le \epsilon`.

    Attributes:
        epsilon: largest change of each input number, in the unit of the inputs before the model standardises them.
        low, high: the range of valid inputs; None: unlimited.
        steps: of each PGD run; each moves by 2.5 · epsilon / steps.
        restarts: PGD runs per example, the first from the example itself, the others from random starts.
        examples: number of examples of the test split; the same ones in every run.
        seed: of the baseline on which the transferred examples are made; no run of the study uses it.
    """

    __pydantic_config__ = CLOSED

    epsilon: float
    low: float | None = None
    high: float | None = None
    steps: int = 20
    restarts: int = 5
    examples: int = 200
    seed: int = ATTACK_SEED


@dataclass(frozen=True)
class Measure:
    """What the score of a run is, if it is not the task's metric on the test split.

    Attributes:
        name: of the registry, one of :func:`gonio.lab.running.measures.measures`.
        options: arguments of that function; a recipe's own setting may replace some.
    """

    __pydantic_config__ = CLOSED

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RecipeEntry:
    """A recipe as data, with its hash; the baseline usually has empty content.

    Attributes:
        setting: what differs from the plan for this recipe alone: `model` (arguments of the model's factory),
            `training` (fields of :class:`TrainingConfig`), `measure` (options of the plan's measure), `lsuv` (how many
            `examples` of the training split LSUV reads first). Empty for a recipe of a comparison, where everything but
            the recipe is equal.
    """

    __pydantic_config__ = CLOSED

    name: str
    content: Mapping[str, Any]
    hash: str
    setting: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: Recipe, setting: Mapping[str, Mapping[str, Any]] | None = None) -> RecipeEntry:
        """The entry of a recipe; with a setting, its hash covers the name and the setting too."""
        content = recipe.to_dict()
        if not setting:
            return cls(recipe.name, content, recipe.hash)
        text = json.dumps([recipe.name, recipe.hash, setting], sort_keys=True)
        return cls(recipe.name, content, hashlib.sha256(text.encode()).hexdigest(), setting)

    @property
    def unchanged(self) -> bool:
        """Whether the recipe has no rules, and nothing that acts on steps."""
        return not any(self.content.get(key) for key in (*VERBS, *TRAINING))

    @property
    def changes(self) -> tuple[str, ...]:
        """Each verb with each method that it uses, once, e.g. `("swap DecoupledConv2d.from_conv",)`."""
        rules = [(verb, rule) for verb in VERBS for rule in self.content.get(verb, ())]
        found = [f"{verb} {rule['use']}" for verb, rule in rules if rule["use"] != "keep"]
        optimizer, hold, clip = (self.content.get(part) for part in TRAINING)
        found += [f"optimizer {optimizer['use']}"] if optimizer else []
        found += [f"hold {hold.get('norm', 'matrix')}"] if hold else []
        found += [f"clip_qk {clip.get('limit', 100.0):g}"] if clip else []
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """Recipes × seeds on one task and model, all trained and judged in the same way.

    Attributes:
        recipes: the baseline first.
        direction: `max` if a larger score is better, else `min`.
        unit: of the score and of `sesoi`.
        splits: number of examples in `train`, `validation` and `test`.
        data: SHA-256 over every number of the three splits.
        sesoi: smallest effect of interest, in the metric's unit.
        worst: score of a diverged run; None: the worst finished score of the study.
        code: SHA-256 of each user file that defines the task or model.
        notes: remarks for the reader. `notes`, `versions`, `command`, `history`, `chance` and `workers` are no part of
            the hash.
        training: None if `task` is the user's own training script.
        self_test: the recipes change nothing and draw other random numbers than the baseline.
        tuning: how every recipe is tuned first; None: not at all.
        threat: how trained models are attacked; None: not at all.
        history: one entry for each time that seeds or recipes were added after results existed.
        chance: score of the best constant prediction; None if it is unknown.
        measure: what the score of a run is; None: the task's metric on the test split.
        workers: processes that load the items of data sets in each run.
        device: kind of device on which the runs compute: `cpu`, `cuda` or `mps`.
        metrics: further metrics that are shown, with their units; they decide nothing.
    """

    __pydantic_config__ = CLOSED

    task: str
    model: str
    recipes: tuple[RecipeEntry, ...]
    seeds: tuple[int, ...]
    training: TrainingConfig | None
    metric: str
    direction: Annotated[str, Field(pattern="^(max|min)$")]
    unit: str
    splits: Mapping[str, int]
    data: str
    sesoi: float
    worst: float | None = None
    code: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    history: tuple[Mapping[str, Any], ...] = ()
    self_test: bool = False
    tuning: Tuning | None = None
    threat: AttackConfig | None = None
    chance: float | None = None
    measure: Measure | None = None
    device: str = "cpu"
    metrics: Mapping[str, str] = field(default_factory=dict)
    workers: int = 0

    @property
    def scripted(self) -> bool:
        """Whether `task` is the user's own training function."""
        return self.training is None

    @property
    def trained(self) -> TrainingConfig:
        """The training settings; an error for a script, which trains by itself."""
        if self.training is None:
            raise ValueError(f"{self.task} trains by itself")
        return self.training

    def training_of(self, entry: RecipeEntry) -> TrainingConfig:
        """The training settings of one recipe.

        If it names an optimizer, a learning rate or decay that it leaves out is the plan's; its other arguments are
        those of that optimizer by default, because another one's would mean something else.
        """
        own = dict(entry.content.get("optimizer") or {})
        if own:
            own["optimizer"] = own.pop("use")
            momentum = arguments_of(own["optimizer"]).get("momentum", 0.0)
            own = {"momentum": momentum, "betas": None, "others_factor": None, **own}
        return replace(self.trained, **{**own, **entry.setting.get("training", {})})

    def fresh_model(self, entry: RecipeEntry, sizes: Mapping[str, int]) -> nn.Module:
        """A model as a run of the entry starts, before its recipe is applied."""
        factory = resolve_model(self.model)
        return replace(factory, function=partial(factory.function, **entry.setting.get("model", {})))(**sizes)

    def check_code(self) -> None:
        """Refuse files of the user's that were edited since the study was planned.

        Raises:
            InvalidArgumentError: names them.
        """
        if edited := [spec for spec, digest in self.code.items() if code_digest(spec) != digest]:
            needs = "every run of a study uses the files that it was planned with"
            do = "Restore them and run the command again, or start a new study with another -o."
            raise InvalidArgumentError(needs, f"another content of {', '.join(edited)} or of what it imports", do)

    @property
    def sign(self) -> int:
        """1 if a larger score is better, else −1."""
        return 1 if self.direction == "max" else -1

    def seed_of(self, entry: RecipeEntry, seed: int) -> int:
        """The seed of a run's random numbers: `seed`; another one in a self-test or with `draw` set."""
        own = "draw" in entry.setting or (self.self_test and entry.name != self.baseline.name)
        return derive_seed(seed, entry.name) if own else seed

    @property
    def hash(self) -> str:
        """SHA-256 over everything that a result depends on."""
        content = {key: value for key, value in asdict(self).items() if key not in _UNHASHED}
        content = {key: value for key, value in content.items() if value != _LATER.get(key, _ALWAYS)}
        if content.get("tuning") and content["tuning"]["repeats"] == 1:
            del content["tuning"]["repeats"]  # as in plans of an older gonio
        content["training"] = None if self.training is None else self.training.to_dict()
        for entry in content["recipes"]:
            if not entry["setting"]:
                del entry["setting"]  # as in plans of an older gonio
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def baseline(self) -> RecipeEntry:
        """The unchanged model, to which every recipe is compared."""
        return self.recipes[0]

    @property
    def grid(self) -> tuple[tuple[RecipeEntry, int], ...]:
        """Every run, seed by seed, so that an unfinished study consists of whole pairs."""
        return tuple((recipe, seed) for seed in self.seeds for recipe in self.recipes)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able data, `hash` included."""
        return {**asdict(self), "hash": self.hash}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StudyPlan:
        """The inverse of :meth:`to_dict`; an unknown key or a value of another type is a ValueError."""
        if not isinstance(data, Mapping):
            raise ValueError("a plan is a mapping")
        values = {key: value for key, value in data.items() if key != "hash"}
        for key in ("training", "tuning", "threat", "measure"):
            values[key] = values.get(key) or None
        found: StudyPlan = adapter(StudyPlan).validate_python(values)
        return found


def installed_versions() -> Mapping[str, str]:
    """Versions of Python and of the packages that results depend on, and the GPU if this process computes on one."""
    found = {"python": platform.python_version()}
    for package in ("gonio", "torch", "numpy", "scipy", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_initialized():
        found["device"] = torch.cuda.get_device_name()
    return found


def seeds_of(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """The seeds from their number (0, 1, …) or from a sequence."""
    wanted = range(seeds) if isinstance(seeds, int) else seeds
    count = wanted.stop - wanted.start if isinstance(wanted, range) else len(wanted)  # len(range) may overflow
    if count > _MOST_SEEDS:
        most = f"a comparison has at most {_MOST_SEEDS:,} seeds"
        raise InvalidArgumentError(most, str(count), "Ten to twenty are usual.")
    found = tuple(wanted)
    if beyond := [seed for seed in found if abs(seed) > _LARGEST_SEED]:
        largest = f"a seed must be at most {_LARGEST_SEED} (2^62)"
        raise InvalidArgumentError(largest, str(beyond[0]), "Choose a smaller first seed.")
    if not found or len(set(found)) < len(found):
        needs = "a comparison needs at least one seed, none of them twice"
        raise InvalidArgumentError(needs, repr(seeds), "Give 8, or (0, 1, 2).")
    if taken := sorted({TUNING_SEED, TUNING_SEED + 1, ATTACK_SEED}.intersection(found)):
        other = "the seeds of a comparison must not be those of tuning and of attacks"
        raise InvalidArgumentError(other, str(taken[0]), "Choose another.")
    return found


def extended(old: StudyPlan, new: StudyPlan, *, path: str, finished: int) -> StudyPlan:
    """The plan of a study with plan `old` that is continued with plan `new`.

    Seeds and recipes may be added; everything else must be equal. If runs were finished, the addition is
    recorded in `history`, because adding seeds after a look at the results is a second look.

    Raises:
        PlanChangedError: lists every key that differs with its old and new value.
    """
    changes = _changes(old, new)
    if changes:
        raise PlanChangedError(path, changes)
    added = {
        "seeds": [seed for seed in new.seeds if seed not in old.seeds],
        "recipes": [entry.name for entry in new.recipes if entry not in old.recipes],
    }
    looked = finished > 0 and any(added.values())
    history = (*old.history, {**added, "finished": finished}) if looked else old.history
    # `versions` are those of the first run; each run's row has its own.
    return replace(new, history=history, versions=old.versions)


def _in_old_names(old: StudyPlan, new: StudyPlan) -> StudyPlan:
    """The new plan with the old one's names of files that are the same: seen from another folder, or moved."""
    names = {}
    if new.task != old.task and (_same_code(old.task, new.task, old, new) or _same_data(old, new)):
        names[new.task] = old.task
    if new.model != old.model and _same_code(old.model, new.model, old, new):
        names[new.model] = old.model
    code = {names.get(spec, spec): digest for spec, digest in new.code.items()}
    return replace(new, task=names.get(new.task, new.task), model=names.get(new.model, new.model), code=code)


def _same_code(was: str, now: str, old: StudyPlan, new: StudyPlan) -> bool:
    """Whether two names FILE.py:FUNCTION are of one function of files with the same content."""
    digest = old.code.get(was)
    return digest is not None and digest == new.code.get(now) and was.rpartition(":")[2] == now.rpartition(":")[2]


def _same_data(old: StudyPlan, new: StudyPlan) -> bool:
    """Whether two names SOURCE:PATH are of one source and the same data."""
    (source, _, _), (other, _, _) = old.task.rpartition(":"), new.task.rpartition(":")
    no_code = old.task not in old.code and new.task not in new.code
    return no_code and bool(source) and source == other and bool(old.data) and old.data == new.data


def _changes(old: StudyPlan, new: StudyPlan) -> list[tuple[str, str, str]]:
    before, after = _flat(old), _flat(_in_old_names(old, new))
    keys = [*before, *(key for key in after if key not in before)]
    changes = [(key, before.get(key, "absent"), after.get(key, "absent")) for key in keys]
    changes = [(key, was, now) for key, was, now in changes if was != now]
    if any(seed not in new.seeds for seed in old.seeds):
        changes.append(("seeds", str(list(old.seeds)), str(list(new.seeds))))
    recipes = {entry.name: entry.hash for entry in new.recipes}
    for entry in old.recipes:
        if recipes.get(entry.name) != entry.hash:
            changes.append((f"recipe {entry.name}", _short(entry.hash), _short(recipes.get(entry.name, "absent"))))
    return changes


def _flat(plan: StudyPlan) -> dict[str, str]:
    """The fields that may not change, as text; nested keys as `training.lr`."""
    flat: dict[str, str] = {}
    for key, value in asdict(plan).items():
        if key in (*_UNHASHED, "recipes", "seeds"):
            continue
        if isinstance(value, Mapping):
            flat.update({f"{key}.{inner}": _short(str(item)) for inner, item in value.items()})
        else:
            flat[key] = _short(str(value))
    return flat


def _short(text: str) -> str:
    """Hashes shortened for reading."""
    return f"{text[:12]}…" if len(text) == 64 else text
