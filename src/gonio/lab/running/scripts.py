"""Training scripts of the user's own: the `Run` that they get, and how gonio calls them."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gonio.errors import GonioError, InvalidArgumentError, UnmatchedRuleError
from gonio.escaping import plain, write_text
from gonio.lab.plan import AttackConfig, RecipeEntry, StudyPlan
from gonio.lab.record import RunRecord, filter_summary
from gonio.lab.running.cost import Gauge
from gonio.lab.running.engines.local import die_with_parent
from gonio.lab.running.robustness import answer_of, attacked, chosen
from gonio.lab.running.training import guarded
from gonio.lab.tasks.task import kept_generators, seed_everything
from gonio.models.by_name import load_script
from gonio.optim import Held
from gonio.recipes import Recipe
from gonio.recipes.apply import Applied
from gonio.seeding import derive_seed

_LOG, _OUTCOME, _PLAN, _RESUME, _PROBED = "log.jsonl", "outcome.json", "plan.txt", "resume", "probed.json"
_ATTACKED = "attacked.json"
_LONGEST = 1000  # points of a curve in the database
_UNTIMED, _TIMED = 5, 100  # steps: allocators and kernel selection settle in the first; so many others are measured


class Run:
    """One run of `gonio compare --script train.py:train`: the argument of `train`.

    It may be sent to processes that `train` starts (before `apply_` is called): they log and report into the same
    run, and end when the process that started them ends.

    Attributes:
        seed: for everything random in the run. The global generators are seeded already.
        recipe: the recipe's name; `baseline` for the unchanged model.
        device: where to train: `cpu`, `cuda` or `mps`, as `--device` says; a run sees one GPU.
        folder: for files of the run; removed when the run is finished.
        resume_path: where `train` may keep a checkpoint, a file or a folder. If it exists at the start, an earlier
            attempt of the same run was interrupted and left it.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> def train(run):
        ...     model = nn.Linear(4, 2)
        ...     run.apply_(model)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     with run.step():
        ...         loss = model(torch.ones(1, 4)).square().sum() + run.penalty()
        ...         loss.backward()
        ...         optimizer.step()
        ...     run.log(0, train_loss=loss)
        ...     return -loss
        >>> run = gonio.lab.Run({"name": "baseline"}, seed=0, folder=Path(tempfile.mkdtemp()))
        >>> train(run).item() < 0, run.resume_path.exists()
        (True, False)
    """

    def __init__(
        self,
        recipe: Mapping[str, Any],
        *,
        seed: int,
        folder: Path,
        device: str = "cpu",
        threat: AttackConfig | None = None,
    ) -> None:
        self.seed = seed
        self.recipe = str(recipe["name"])
        self.device = device
        self.folder = folder
        self._threat = threat
        self._steps = 0
        self._gauges: list[Gauge] = []
        self.resume_path = folder / _RESUME
        self._content = dict(recipe)
        self._model: nn.Module | None = None
        self._applied: Applied | None = None

    def __repr__(self) -> str:
        return f"<Run of {plain(self.recipe)} with seed {self.seed}>"

    def apply_(self, model: nn.Module) -> Applied:
        """Apply the run's recipe to the model, in place; the baseline changes nothing.

        Call it once in each process that trains, before the optimizer is made and before the model is
        wrapped. The state of the global random generators is preserved, so all recipes draw the same numbers
        afterwards.

        Raises:
            InvalidArgumentError: it was called before.
            UnmatchedRuleError: a rule matches no layer of this model.
        """
        if self._applied is not None:
            raise InvalidArgumentError(
                "run.apply_ takes the one model of the run", "a second call", "Call it once in each process."
            )
        recipe = Recipe.from_dict(self._content)
        text = str(recipe.plan(model))
        with kept_generators():
            self._applied = recipe.apply_(model, seed=self.seed)
        self._model = model
        if leads():
            write_text("" if RecipeEntry.of(recipe).unchanged else text, self.folder / _PLAN)
        return self._applied

    def hold_(self, optimizer: Optimizer) -> Held | None:
        """Hand over the optimizer, on whose steps the hold and the clip of the run's recipe act, if it has them.

        Call it after the optimizer is built and before its learning rate schedule; a recipe with one of them refuses
        the first step otherwise. The radii are in the optimizer's state dict, so a checkpoint has them.

        Raises:
            InvalidArgumentError: `apply_` was not called in this process.
        """
        return self._made("run.hold_").hold_(optimizer)

    @property
    def penalty(self) -> Callable[[], Tensor]:
        """A function whose value is added to the loss of each step; 0 for a recipe without penalty.

        Raises:
            InvalidArgumentError: `apply_` was not called in this process.
        """
        return self._made("run.penalty").penalty or (lambda: torch.zeros(()))

    def _made(self, name: str) -> Applied:
        if self._applied is None:
            raise InvalidArgumentError(
                f"{name} needs the model of run.apply_", "no call of run.apply_", "Call it first."
            )
        return self._applied

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure what a training step costs: time, and peak memory on an accelerator.

        Put the whole step into the block: forward, penalty, backward, optimizer. The costs of a recipe are ratios to
        those of the baseline with the same seed. Of each run 100 steps are measured, from the sixth on.
        """
        self._steps += 1
        if not _UNTIMED < self._steps <= _UNTIMED + _TIMED:
            yield
            return
        with Gauge(torch.device(self.device)) as gauge:
            yield
        self._gauges.append(gauge)

    def hand_over(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, *, low: float | None = None, high: float | None = None
    ) -> None:
        """Give the trained model and test examples to the attacks of `--robust`; does nothing without it.

        Call it before the score is reported. The model must map inputs in their own unit to logits.

        Args:
            low, high: the range of valid inputs; None: unlimited.
        """
        if self._threat is None or not leads():
            return
        config = replace(self._threat, low=low, high=high)
        inputs, targets = (x.detach().cpu()[chosen(len(targets), config)] for x in (inputs, targets))
        found = attacked(answer_of(model), inputs, targets, config, None)
        write_text(json.dumps(found), self.folder / _ATTACKED)

    def log(self, step: int, **values: float | Tensor) -> None:
        """Store numbers of this step for the page's curves; logging a step again replaces its values.

        In a process group only rank 0 writes. The page draws `train_loss` and `val_score` for all recipes. The last
        value of every name is a further metric of the run, which is shown and decides nothing.

        Raises:
            InvalidArgumentError: a value is no number, or there is none.
        """
        numbers = {name: _number(name, value) for name, value in values.items()}
        if not numbers:
            raise InvalidArgumentError("run.log needs numbers", f"none for step {step}", "Write run.log(step, loss=…).")
        if leads():
            with (self.folder / _LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": int(step), "values": numbers}) + "\n")

    def report(self, score: float | Tensor) -> None:
        """Report the run's score, if `train` does not return it.

        In a process group only rank 0 writes. A NaN or Inf score marks the run as diverged.
        """
        if leads():
            geometry = {} if self._model is None else filter_summary(self._model)
            found = {"score": _number("the score", score), "geometry": geometry, "costs": self._costs()}
            write_text(json.dumps(found), self.folder / _OUTCOME)

    def _costs(self) -> dict[str, float]:
        if not self._gauges:
            return {}
        peaks = [gauge.peak for gauge in self._gauges if gauge.peak is not None]
        seconds = statistics.median(gauge.seconds for gauge in self._gauges)
        return {"step_time": seconds, **({"memory": float(max(peaks))} if peaks else {})}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None, "_applied": None, "_gauges": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        die_with_parent()  # a process that receives the run is part of it


Logged = dict[int, dict[str, float | None]]  # values by name, by step


def curve_of(steps: Logged) -> dict[str, list[float | None]]:
    """The logged steps, and one value per step for each name; every n-th step of more than 1,000."""
    names = dict.fromkeys(name for values in steps.values() for name in values)
    kept = sorted(steps)[:: max(1, math.ceil(len(steps) / _LONGEST))]
    curve: dict[str, list[float | None]] = {name: [steps[step].get(name) for step in kept] for name in names}
    return {"step": [float(step) for step in kept], **curve} if kept else {}


def logged(folder: Path) -> Logged:
    """What a run has logged."""
    steps: Logged = {}
    path = folder / _LOG
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):  # an incomplete line: the process was killed while writing it
            entry = json.loads(line)
            steps.setdefault(entry["step"], {}).update(entry["values"])
    return steps


def leads() -> bool:
    """Whether this process is the only one, or rank 0 of its process group."""
    group = torch.distributed
    return not (group.is_available() and group.is_initialized()) or group.get_rank() == 0


def _number(name: str, value: object) -> float | None:
    """A number for JSON: None for NaN and Inf."""
    try:
        number = float(value.detach() if isinstance(value, Tensor) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"{name} must be a number", f"{value!r}"[:80], "Give one number.") from error
    return number if math.isfinite(number) else None


def execute_script(plan: StudyPlan, entry: RecipeEntry, seed: int, folder: Path | None = None) -> dict[str, Any]:
    """One run of the user's function, in a process of its own.

    Args:
        folder: for the run's files; None: a temporary one.
    """
    with tempfile.TemporaryDirectory(prefix="gonio-run-") as temporary:
        own = folder or Path(temporary)
        return guarded(RunRecord(entry.name, seed, "failed"), lambda: _run_script(plan, entry, seed, own))


def _run_script(plan: StudyPlan, entry: RecipeEntry, seed: int, folder: Path) -> RunRecord:
    """Call the user's function and take its score; its exceptions are passed on."""
    folder.mkdir(exist_ok=True)  # without parents: a study that was moved is not made again
    plan_file, outcome, attack = folder / _PLAN, folder / _OUTCOME, folder / _ATTACKED
    for file in (plan_file, outcome, attack):  # of an earlier attempt, whose checkpoint and log stay
        file.unlink(missing_ok=True)
    own_seed = plan.seed_of(entry, seed)
    content = entry.content or {"name": entry.name}
    run = Run(content, seed=own_seed, folder=folder.absolute(), device=plan.device, threat=plan.threat)
    torch.set_num_threads(1)
    plan.check_code()
    train = load_script(plan.task)
    seed_everything(derive_seed(own_seed, "train"))
    score = train(run)
    if not plan_file.exists():
        raise InvalidArgumentError(
            f"{plan.task} must train the model that it passes to run.apply_", "no call of run.apply_", "Call it once."
        )
    if score is not None:
        run.report(score)
    if not outcome.exists():
        raise InvalidArgumentError(
            f"{plan.task} must give the score of its run", "None", "Return a number, or call run.report(score)."
        )
    found = json.loads(outcome.read_text(encoding="utf-8"))
    text, steps = plan_file.read_text(encoding="utf-8"), logged(folder)
    record = RunRecord(entry.name, seed, "finished", found["score"], plan=text, curve=curve_of(steps))
    if record.score is None:
        return replace(record, status="diverged", error="the score is not finite")
    if plan.threat is not None and not attack.exists():
        raise InvalidArgumentError(
            "--robust attacks the model that the script hands over", "no call of run.hand_over", "Call it once."
        )
    robustness = json.loads(attack.read_text(encoding="utf-8")) if plan.threat is not None else {}
    last = {name: value for step in sorted(steps) for name, value in steps[step].items()}
    return replace(record, geometry=found["geometry"], costs=found["costs"], metrics=last, robustness=robustness)


class _Probed(BaseException):
    """Ends the script once its model is known; not an Exception, so that a script does not catch it."""


class _Probe:
    """Stands for the run until the script passes its model, on which every recipe is then planned."""

    def __init__(self, recipes: Sequence[dict[str, Any]], folder: Path, device: str) -> None:
        self.seed, self.recipe, self.folder = 0, "baseline", folder
        self.device = device
        self.resume_path = folder / _RESUME
        self._recipes = recipes

    def apply_(self, model: nn.Module) -> None:
        unfit: dict[str, str] = {}
        found: dict[str, Any] = {"unfit": unfit}
        try:
            for recipe in map(Recipe.from_dict, self._recipes):
                try:
                    recipe.plan(model)
                except UnmatchedRuleError as error:
                    unfit[recipe.name] = str(error)
        except GonioError as error:
            found = {"error": str(error)}
        (self.folder / _PROBED).write_text(json.dumps(found), encoding="utf-8")
        raise _Probed

    def log(self, step: int, **values: object) -> None:
        """Ignored: nothing is trained."""


def probe_script(spec: str, recipes: Sequence[dict[str, Any]], device: str = "cpu") -> dict[str, Any]:
    """Run the script up to its `run.apply_` and plan every recipe on its model. Meant for a process of its own.

    Returns `unfit`: by name, why a recipe does not match the model; or `error`: the problem of the script.
    """
    with tempfile.TemporaryDirectory(prefix="gonio-probe-") as temporary:
        folder = Path(temporary)
        problem = "it ended without a call of run.apply_"
        try:
            seed_everything(0)
            load_script(spec)(_Probe(recipes, folder, device))
        except GonioError as error:
            problem = str(error)
        except (Exception, SystemExit, _Probed) as error:  # a process group wraps exceptions of its processes
            problem = f"it raised {type(error).__name__}: {error}"
        path = folder / _PROBED
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found or {"error": f"{spec}: {problem}"}
