"""A claim of a paper as data: the sentence, what is compared with what, and what would confirm it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, create_model, model_validator

from gonio.errors import ClaimError, GonioError, InvalidArgumentError, UnknownNameError, closest
from gonio.escaping import shorten
from gonio.lab.claims.expanding import FormError, expanded
from gonio.lab.plan import TRAINING_RANGES, Measure, TrainingConfig
from gonio.lab.running.measures import spec_of
from gonio.messages import say
from gonio.models.by_name import folders_of, is_user_code
from gonio.optim.named import check_settings
from gonio.recipes import BASELINE, Recipe, built_in_names
from gonio.recipes.document import from_data, parse, read

# The five documents that the claims come from, the control of the method itself, and all other sources.
SEEDS: Mapping[str, str] = {
    "000": say("angles between filters"),
    "001": say("scale of weights"),
    "002": say("normalisation"),
    "003": say("decoupled networks"),
    "004": say("geometric initialisation"),
    "training": say("norms and angles while a network trains"),
    "control": say("a claim that is false by construction"),
    "other": say("other sources"),
}
# How far a verdict reaches: that of an identity is `holds` or `fails`; only in the field a paper is reproduced.
SCOPES: Mapping[str, str] = {
    "identity": say("true to a tolerance, or not"),
    "mechanism": say("why a method does what it does, in small networks"),
    "small": say("small data or a small network"),
    "field": say("real data at their own resolution, at least 10,000 training examples, a network of the field"),
}
CHOICE_SEEDS = (1_000_033, 1_000_037)  # runs that choose a dose; they are not judged
FEWEST_DOSES = 6
CONTROLS = ("again", "longer")  # arms that every experiment gets, see :func:`controlled`
_SUFFIXES = (".yaml", ".yml")
_CATALOG = Path(__file__).with_name("catalog")
_FAMILIES = Path(__file__).with_name("families.yaml")
_RECORDED = Path(__file__).with_name("recorded.json")  # written by docs/build_claims.py

_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.+-]*$", max_length=60)]
_Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
_Reason = Annotated[str, StringConstraints(strip_whitespace=True)]
_CLOSED = ConfigDict(extra="forbid", frozen=True, strict=True)


_OPTIONAL: Any = {name: (kind | None, None) for name, kind in get_type_hints(TrainingConfig).items()}
_Fields: Any = create_model("_Fields", __config__=_CLOSED, **_OPTIONAL)


class TrainingFields(_Fields):
    """Fields of :class:`TrainingConfig`; those that are missing are the task's own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            check_settings(self.model_dump(), TRAINING_RANGES)
        except InvalidArgumentError as error:
            raise ValueError(str(error)) from error
        return self

    def override(self, training: TrainingConfig) -> TrainingConfig:
        """These values in place of those of `training`."""
        return TrainingConfig(**{**vars(training), **self.model_dump(exclude_none=True)})


class Fair(BaseModel):
    """What makes the experiment of a claim a fair test; :mod:`gonio.lab.claims.fairness` has the rules.

    Attributes:
        floor: task score that every arm must reach in the mean over the seeds. ceiling: the same where less is better.
        margin: largest difference between the mean task scores of the arms, for a claim on another quantity.
        untrained: why only one arm must reach the floor: the claim is about whether networks train.
        unequal: why the arms' task scores may differ: no score is behind the quantity.
        speed: why the length of training is part of the claim.
        untuned: why all arms have one learning rate.

    Example:
        >>> gonio.lab.claims.load_claim("som-spread").fair.margin
        1.0
    """

    model_config = _CLOSED
    floor: float | None = None
    ceiling: float | None = None
    margin: Annotated[float, Field(gt=0)] | None = None
    untrained: _Reason = ""
    unequal: _Reason = ""
    speed: _Reason = ""
    untuned: _Reason = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.floor is not None and self.ceiling is not None:
            raise ValueError("a claim has a floor where larger scores are better, or else a ceiling; found both")
        return self


class Arm(BaseModel):
    """One side of a comparison.

    Attributes:
        of: name of the arm of which this is one dose; `level` is the dose. In a file an arm has `doses`, and `{dose}`
            stands for each of them.
        level: position on the axis of a claim with several levels, such as the batch size.
        series: name of the curve that the arm belongs to, if there are several levels.
        recipe: the rules of a recipe by verb, or the name of a built-in recipe; nothing for the plain model.
        model, training, measure: what differs from the setting of the claim.
        lsuv: number of training examples on which :func:`gonio.lsuv_` initialises the model; 0 for none.
        redraw: draw other random numbers than the other arms, for a control.

    Example:
        >>> arm = gonio.lab.claims.load_claim("som-spread").full.arms[1]
        >>> arm.name, arm.side, [rule.use for rule in arm.built_recipe.penalty]
        ('self-orthogonality-0.01', 'self-orthogonality', ['SelfOrthogonality'])
    """

    model_config = _CLOSED
    name: _Name
    level: float | None = None
    series: str = ""
    recipe: str | dict[str, Any] = {}
    model: dict[str, Any] = {}
    training: TrainingFields = TrainingFields()
    measure: dict[str, Any] = {}
    lsuv: Annotated[int, Field(ge=0)] = 0
    redraw: bool = False
    of: str = ""

    @property
    def side(self) -> str:
        """The name in a contrast: that of the arm, or of the arm of which this is a dose."""
        return self.of or self.name

    @property
    def built_recipe(self) -> Recipe:
        """The recipe, named after the arm."""
        if isinstance(self.recipe, str) and self.recipe not in (known := [BASELINE, *built_in_names()]):
            raise UnknownNameError("recipe", self.recipe, known)  # a file would not be kept beside the runs
        content = Recipe.load(self.recipe).to_dict() if isinstance(self.recipe, str) else self.recipe
        return Recipe.from_dict({**content, "name": self.name})

    @property
    def content(self) -> str:
        """All that its runs follow from: equal for two arms whose runs are equal."""
        rules = {**self.built_recipe.to_dict(), "name": ""}
        return repr((rules, self.model_dump(exclude={"name", "level", "series", "of", "recipe"})))


class Experiment(BaseModel):
    """Everything that a claim is tried with.

    Attributes:
        task, model: names of a task and a built-in model; `model` may have arguments of its factory.
        arms: the sides; the first is the baseline. In a file `grid` adds one arm for each pair of a `series` and one of
            the `levels`; `{series}` and `{level}` in its `recipe` stand for them.
        contrast: factor of each arm in the number that is tested, e.g. {group: 1, batch: -1}. A pattern stands for the
            mean of the arms that it matches, e.g. {"sphere-*|ball-*": 1, plain: -1}.
        choose: which dose of an arm is judged, by its mean over :data:`CHOICE_SEEDS`: the `best` score, or the
            `strongest` dose whose task score is within `fair.margin` of the baseline's.
        tune: trials of the learning rate and of strengths, equally many for each arm.
        seeds: number of paired seeds.

    Example:
        >>> gonio.lab.claims.load_claim("som-spread").full.decisive
        {'self-orthogonality': 1.0, 'plain': -1.0}
    """

    model_config = _CLOSED
    task: str = "digits"
    model: dict[str, Any] = {}
    training: TrainingFields = TrainingFields()
    arms: tuple[Arm, ...] = ()
    contrast: dict[str, float] = {}
    choose: Literal["best", "strongest"] = "best"
    tune: Annotated[int, Field(ge=0)] = 0
    seeds: Annotated[int, Field(gt=0, le=1000)] = 10

    @property
    def decisive(self) -> Mapping[str, float]:
        """The contrast; the second arm minus the first if none is given."""
        sides = self.sides
        return self.contrast or {sides[1]: 1.0, sides[0]: -1.0}

    @property
    def sides(self) -> tuple[str, ...]:
        """What a contrast can name: the arms, with all doses of one as one."""
        return tuple(dict.fromkeys(arm.side for arm in self.arms))

    @property
    def dosed(self) -> bool:
        """Whether an arm has doses, one of which is chosen."""
        return any(arm.of for arm in self.arms)

    @property
    def baseline(self) -> Arm:
        """The arm that controls repeat: the first with a negative factor in the contrast, or the first of all."""
        negative = [arm for arm in self.arms if self.decisive.get(arm.side, 0.0) < 0]
        return (negative or list(self.arms))[0]


class Claim(BaseModel):
    """A sentence of a paper and the experiment that tests it.

    Attributes:
        name: of the file.
        seed: the document that states it, or a topic that the documents leave out, one of :data:`SEEDS`.
        claim: the sentence. claim_zh: the same in Chinese, for the Chinese pages; every claim of the catalogue has it.
        source: paper and section.
        measure: what is measured, a measure of :func:`gonio.lab.running.measures.measures`, with options.
        direction: the claim is that the contrast is `larger` than 0, `smaller`, or the `same`.
        sesoi: smallest effect of interest in the unit of the measure.
        scope: how far the verdict reaches, one of :data:`SCOPES`. fair: what makes the experiment a fair test.
        reported: what the source measured.
        differs: how the experiment differs from the source.
        quick: the experiment of some seconds; full: of minutes to hours.
        picture: how the page shows it.
        axis: label of the levels. log: whether they are on a logarithmic axis.
        not_tried: why the claim is not tried at all.

    Example:
        >>> claim = gonio.lab.claims.load_claim("bn-imagenet")
        >>> claim.budget, claim.not_tried.partition(" for")[0]
        ('none', 'ImageNet and ResNet-50 need GPUs')
    """

    model_config = _CLOSED
    name: _Name
    seed: Literal["000", "001", "002", "003", "004", "training", "control", "other"] = "other"
    claim: _Text
    claim_zh: str = ""
    source: _Text
    measure: str = "accuracy"
    options: dict[str, Any] = {}
    direction: Literal["larger", "smaller", "same"] = "larger"
    sesoi: Annotated[float, Field(gt=0)] = 1.0
    scope: Literal["identity", "mechanism", "small", "field"] = "small"
    fair: Fair = Fair()
    reported: str = ""
    differs: str = ""
    quick: Experiment | None = None
    full: Experiment | None = None
    picture: Literal["pairs", "levels", "angles"] = "pairs"
    axis: str = ""
    not_tried: str = ""

    def __repr__(self) -> str:
        return f"<Claim {self.name}: {self.claim}>"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.not_tried) == bool(self.quick or self.full):
            raise ValueError("a claim has an experiment, quick or full, or says under not_tried why there is none")
        try:
            spec = spec_of(Measure(self.measure, self.options))
        except GonioError as error:
            raise ValueError(f"measure: {error}") from error
        for name, setting in (("quick", self.quick), ("full", self.full)):
            try:
                if setting is not None:
                    self._check_setting(setting, is_score=spec.better is not None)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return self

    def _check_setting(self, setting: Experiment, *, is_score: bool) -> None:
        names, sides = [arm.name for arm in setting.arms], setting.sides
        if not names or len(set(names)) < len(names):
            raise ValueError(f"an experiment needs arms with different names; found {names}")
        if reserved := sorted(set(CONTROLS) & {*names, *sides}):
            raise ValueError(f"{reserved[0]} is the name of a control, which every experiment gets")
        if not setting.contrast and len(sides) < 2:
            raise ValueError("an experiment with one arm needs a contrast")
        for named in (setting.task, setting.model.get("name", "")):
            if not isinstance(named, str):
                raise ValueError(f"the name of a model is text, not {shorten(repr(named), longest=60)}")
            if is_user_code(named):
                code = shorten(repr(named), longest=60)
                raise ValueError(f"{code} names code, which only --task and --model of the command line can")
        if setting.tune and not is_score:
            raise ValueError(f"tune needs a measure that is a score; {self.measure} has no better side")
        try:
            alike: dict[str, str] = {}
            for arm in setting.arms:
                spec_of(Measure(self.measure, {**self.options, **arm.measure}))
                if (other := alike.setdefault(arm.content, arm.name)) != arm.name:
                    raise ValueError(f"the arms {other} and {arm.name} are the same; one of them needs redraw: true")
        except GonioError as error:
            raise ValueError(str(error)) from error
        self._check_contrast(setting, is_score)

    def _check_contrast(self, setting: Experiment, is_score: bool) -> None:
        """Whether the contrast compares arms, or states the level of a quantity whose level means something."""
        factors = setting.decisive
        if unknown := sorted(set(factors) - set(setting.sides)):
            raise ValueError(f"the contrast names arms that do not exist: {', '.join(unknown)}")
        if not any(factors.values()):
            raise ValueError("a contrast with factors of 0 alone compares nothing")
        if (is_score or min(factors.values()) < 0) and abs(sum(factors.values())) > 1e-6:
            needs = "the factors of a contrast between arms must sum to 0, or it depends on the level of all scores"
            raise ValueError(f"{needs}; found {factors}")
        if max(map(abs, factors.values())) > 1 or sum(factor for factor in factors.values() if factor > 0) < 1 - 1e-6:
            needs = "the factors of a contrast lie between -1 and 1 and the positive ones sum to 1 or more"
            raise ValueError(f"{needs}, or effects are not of the size of the scores; found {factors}")

    @property
    def budget(self) -> str:
        """`quick`, `full`, or `none` for a claim that is not tried."""
        return "quick" if self.quick else "full" if self.full else "none"

    def setting(self, *, full: bool) -> Experiment:
        """The experiment: the full one if it is wanted or the only one.

        Raises:
            InvalidArgumentError: the claim is not tried.
        """
        chosen = (self.full or self.quick) if full else (self.quick or self.full)
        if chosen is None:
            raise InvalidArgumentError(f"{self.name} has no experiment", self.not_tried, "Choose another claim.")
        return chosen


def load_claim(source: str | Path) -> Claim:
    """The claim of the catalogue with this name, of a YAML file, or of another package.

    Args:
        source: `NAME`, `file.yaml`, or `PACKAGE:NAME` for a package with the entry point `gonio.claims`, whose value is
            the package that holds the YAML files. They are read as data; the package is not imported.

    Raises:
        UnknownNameError: no claim has this name; gives the closest names.
        ClaimError: the file is not a claim; lists every problem.

    Example:
        >>> claim = gonio.lab.claims.load_claim("som-spread")
        >>> claim.seed, claim.direction, claim.full.sides
        ('000', 'smaller', ('plain', 'self-orthogonality'))
    """
    if Path(source).suffix in _SUFFIXES:
        return _load(Path(source))
    name = str(source)
    if name in claim_names():
        return _of_catalog(name)
    shipped = shipped_files()
    if name not in shipped:
        raise UnknownNameError("claim", name, [*claim_names(), *shipped])
    if len(shipped[name]) > 1:
        found = " and ".join(str(path.parent) for path in shipped[name])
        raise InvalidArgumentError(f"{name} must be a claim of one package", found, "Name one of the files.")
    return _load(shipped[name][0])


@cache
def _of_catalog(name: str) -> Claim:
    """Read once: reading and checking the whole catalogue takes seconds."""
    return _load(_CATALOG / f"{name}.yaml")


def _load(path: Path) -> Claim:
    claim = read_claim(parse(read(path), origin=str(path)).data, origin=str(path))
    if path.parent != _CATALOG and claim.name in claim_names():  # which has a family and verdicts of its own
        needs = f"a claim of your own needs a name of its own, and {claim.name} is one of the catalogue"
        raise ClaimError(needs, str(path), "Change `name` in the file.")
    if path.parent == _CATALOG and not claim.claim_zh:
        needs = f"{path.name} is a claim of the catalogue and must have a Chinese sentence"
        raise ClaimError(needs, "no claim_zh", "Add it.")
    return claim


def read_claim(data: Any, *, origin: str) -> Claim:
    """A claim from plain data.

    Raises:
        ClaimError: lists every problem.
    """
    try:
        content = from_data(data, origin=origin).data
        if isinstance(content, dict):
            content = {
                key: expanded(value, key) if key in ("quick", "full") else value for key, value in content.items()
            }
        # as JSON, where a strict schema takes lists for tuples
        return Claim.model_validate_json(json.dumps(content))
    except ValidationError as error:  # one sentence with every problem
        found = "; ".join(map(_told, error.errors()))
        raise ClaimError(f"{origin} must be a claim", found, "Correct the file.") from error
    except FormError as error:
        raise ClaimError(f"{origin} must be a claim", str(error), "Correct the file.") from error


def _keys_under(parent: str) -> list[str]:
    """The keys that a claim may have under another key; none for one whose keys are not fixed."""
    shapes: dict[str, type[BaseModel]] = {
        "": Claim,
        "quick": Experiment,
        "full": Experiment,
        "arms": Arm,
        "fair": Fair,
        "training": TrainingFields,
    }
    return list(shapes[parent].model_fields) if parent in shapes else []


def _told(row: Any) -> str:
    """One problem of the validator in words of a claim: where it is, what was found and what is accepted."""
    *above, last = [*row["loc"]] or [""]
    at, kind = ".".join(map(str, row["loc"])) or "the claim", row["type"]
    if kind == "missing":
        return f"{at}: it is missing"
    if kind == "extra_forbidden":
        parent = next((key for key in reversed(above) if isinstance(key, str)), "")
        near = closest(str(last), _keys_under(parent))
        return f"{at}: there is no such key" + (f" (did you mean {' or '.join(near)}?)" if near else "")
    said = row["msg"].removeprefix("Value error, ").rstrip(".")
    if kind == "value_error":
        said, _, hint = said.partition(" Did you mean ")
        at = said.partition(":")[0] if not row["loc"] and said.partition(":")[0] in Claim.model_fields else at
        said = said.removeprefix(f"{at}: ")
        return f"{at}: {said.rstrip('.')}" + (f" (did you mean {hint})" if hint else "")
    said = said.replace("Input should be an object", "a mapping").replace("a valid string", "text")
    if kind == "string_pattern_mismatch":
        said = "small letters, digits and . + - alone"
    accepted = said.removeprefix("Input should be ").removeprefix("Input should ").removeprefix("String should have ")
    return f"{at}: {shorten(repr(row['input']), longest=60)}, but expected {accepted}"


@cache
def families() -> Mapping[str, tuple[str, ...]]:
    """The claims that are corrected together, by family; a claim in none is a family of its own.

    A family is fixed: a claim that is added later starts another one, and changes no verdict.

    Example:
        >>> "som-spread" in gonio.lab.claims.families()["angles"]
        True
    """
    return {name: tuple(of) for name, of in parse(read(_FAMILIES), origin=_FAMILIES.name).data.items()}


@cache
def _recorded() -> Mapping[str, Mapping[str, str]]:
    content: dict[str, dict[str, str]] = json.loads(_RECORDED.read_text(encoding="utf-8"))
    return content


def recorded(name: str) -> tuple[str, str]:
    """The verdict on a claim, and its effect, in the runs that the documentation shows; `not tried` without any.

    Example:
        >>> gonio.lab.claims.recorded("bn-imagenet")
        ('not tried', '')
    """
    found = _recorded().get(name, {})
    return found.get("verdict", "not tried"), found.get("effect", "")


def shipped_files() -> Mapping[str, Sequence[Path]]:
    """The files of claims that installed packages ship, as `PACKAGE:NAME`; more than one where packages share a name.

    Example:
        >>> gonio.lab.claims.shipped_files()
        {}
    """
    found: dict[str, list[Path]] = {}
    for point in entry_points(group="gonio.claims"):
        for file in _files_of(point):
            paths = found.setdefault(f"{point.name}:{file.stem}", [])
            paths += [file] if file not in paths else []
    return found


def useless_entry_points() -> tuple[str, ...]:
    """The entry points of claims that lead to no file of one, as `NAME = VALUE`."""
    points = entry_points(group="gonio.claims")
    return tuple(dict.fromkeys(f"{point.name} = {point.value}" for point in points if not _files_of(point)))


def _files_of(point: EntryPoint) -> list[Path]:
    """The files of the package that an entry point names, which is not imported."""
    parts = point.value.split(".")
    found = folders_of(parts[0]) if all(part.isidentifier() for part in parts) else []
    files = (file for folder in found for file in folder.joinpath(*parts[1:]).glob("*"))
    return sorted(file for file in files if file.suffix in _SUFFIXES)


@cache
def claim_names() -> tuple[str, ...]:
    """The names of the catalogue, by seed document and name.

    Example:
        >>> "gain-tanh" in gonio.lab.claims.claim_names()
        True
    """
    return tuple(sorted(path.stem for path in _CATALOG.glob("*.yaml")))


def load_claims(names: Sequence[str] = ()) -> tuple[Claim, ...]:
    """These claims, or all of the catalogue in the order of the seed documents.

    Example:
        >>> claims = gonio.lab.claims.load_claims()
        >>> [claim.seed for claim in claims] == sorted(claim.seed for claim in claims)
        True
    """
    if names:
        return tuple(load_claim(name) for name in dict.fromkeys(names))
    found = [load_claim(name) for name in claim_names()]
    return tuple(sorted(found, key=lambda claim: (claim.seed, claim.budget != "quick", claim.name)))
