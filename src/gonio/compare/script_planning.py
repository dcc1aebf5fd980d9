"""A plan whose training is a function of the user's own."""

from __future__ import annotations

from collections.abc import Sequence

from gonio.compare.plan import Plan
from gonio.compare.plan_checks import check_names, seeds_of
from gonio.compare.planning import BUILT_IN_RECIPES, entry_of, versions
from gonio.compare.results import BASELINE
from gonio.compare.scripted import probe_script
from gonio.compare.workers import Worker
from gonio.errors import InvalidArgumentError
from gonio.models.user_code import code_digest, is_user_code
from gonio.recipes import Recipe

__all__ = ["make_script_plan"]

_NOTE = "Training and score are those of a script of the user's own; equal budgets are the script's to keep."


def make_script_plan(
    recipes: Sequence[str | Recipe] | None = None,
    *,
    script: str,
    seeds: int | Sequence[int] = 8,
    metric: str = "score",
    direction: str = "max",
    unit: str = "",
    sesoi: float = 0.0,
    command: str = "gonio compare",
) -> Plan:
    """Decide a comparison that calls `script` for every run.

    The script is run here up to its `run.apply_`, in a process of its own, and every recipe is planned on the
    model that it gives: a rule that takes no layer is an error before the first run.

    Args:
        recipes: built-in names, files, or recipes. None: one per method family; those that take no layer of the
            script's model are left out, and a note says so.
        script: `file.py:function`; the function is called with a :class:`Run` and gives the score.
        metric, unit: what the score is called. direction: `max` if a larger one is better, else `min`.
        sesoi: smallest effect of interest in the score's unit; 0: none was named, and no effect is then
            called too small to be useful.

    Raises:
        InvalidArgumentError: no Python file, no seeds, an unknown direction, or what the script raised.

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
        >>> plan = gonio.compare.make_script_plan(["orthogonal-init"], script=f"{path}:train", seeds=2)
        >>> plan.scripted, plan.metric, len(plan.grid)
        (True, 'score', 4)
    """
    if not is_user_code(script):
        raise InvalidArgumentError("a script is file.py:function", repr(script), "Name a Python file.")
    if direction not in ("max", "min"):
        raise InvalidArgumentError("a score's direction is 'max' or 'min'", repr(direction), "Use one of them.")
    if not 0 <= sesoi < float("inf"):
        raise InvalidArgumentError("sesoi must be 0 or a positive number", repr(sesoi), "Give a larger one.")
    names = BUILT_IN_RECIPES if recipes is None else recipes
    loaded = [recipe if isinstance(recipe, Recipe) else Recipe.load(recipe) for recipe in names]
    check_names(loaded)
    unfit = _unfit(script, loaded)
    if unfit and recipes is not None:
        raise _error(script, "; ".join(unfit.values()))
    fitting = [recipe for recipe in loaded if recipe.name not in unfit]
    digest = code_digest(script)
    return Plan(
        task=script,
        model="",
        recipes=tuple(entry_of(recipe) for recipe in (Recipe(BASELINE), *fitting)),
        seeds=seeds_of(seeds),
        training=None,
        metric=metric,
        direction=direction,
        unit=unit,
        splits={},
        data="",
        sesoi=sesoi,
        code={script: digest} if digest else {},
        notes=(_NOTE, *(f"{name} is left out: one of its rules takes no layer of the model." for name in unfit)),
        versions=versions(),
        command=command,
    )


def _unfit(script: str, recipes: Sequence[Recipe]) -> dict[str, str]:
    """The recipes of which a rule takes no layer of the script's model, with the reason."""
    worker = Worker(probe_script, script, [recipe.to_dict() for recipe in recipes])
    try:
        found = worker.result()
    except ChildProcessError as error:
        found = {"error": str(error)}
    finally:
        worker.stop()
    if "error" in found:
        raise _error(script, str(found["error"]))
    return dict(found["unfit"])


def _error(script: str, found: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{script!r} must reach run.apply_(model), and every recipe must fit that model",
        found,
        "Correct the script, or name recipes that fit.",
    )
