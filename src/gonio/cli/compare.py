"""`gonio compare`: does it help, and what does it cost?"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gonio.cli import options
from gonio.cli.app import ExitCode, print_err, print_out, show, users_code
from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.messages import counted, say

if TYPE_CHECKING:
    from gonio.lab import StudyPlan
    from gonio.lab.running.engines import Devices, Engine

# By the fields of gonio.lab.TrainingConfig; without an option the task's own value is used.
_TRAINING: dict[str, Any] = {
    "epochs": Annotated[int | None, typer.Option(help="Epochs of each run.", min=1)],
    "batch_size": Annotated[int | None, typer.Option(help="Examples per step of the optimizer.", min=1)],
    "lr": Annotated[float | None, typer.Option(help="Peak learning rate.")],
    "optimizer": Annotated[
        str | None, typer.Option(help="Name of the optimizer, e.g. sgd, adamw or muon.", metavar="NAME")
    ],
    "momentum": Annotated[float | None, typer.Option(help="Momentum, if the optimizer has one.")],
    "weight_decay": Annotated[float | None, typer.Option(help="Weight decay.")],
    "decay": Annotated[
        str | None, typer.Option(help="What decays: all parameters, or weights (no norms, no biases).", metavar="WHAT")
    ],
    "schedule": Annotated[
        str | None, typer.Option(help="Of the learning rate: cosine, constant, step or one-cycle.", metavar="NAME")
    ],
    "warm_up": Annotated[float | None, typer.Option(help="Epochs in which the learning rate rises first.")],
    "clip": Annotated[float | None, typer.Option(help="Largest norm of the gradient.")],
    "label_smoothing": Annotated[float | None, typer.Option(help="Probability that is spread over all classes.")],
    "ema": Annotated[float | None, typer.Option(help="Decay of a moving average of the parameters, which is judged.")],
    "precision": Annotated[str | None, typer.Option(help="fp32, or autocast to bf16 or fp16.", metavar="NAME")],
    "accumulate": Annotated[int | None, typer.Option(help="Parts in which a batch is processed.", min=1)],
    "channels_last": Annotated[
        bool | None, typer.Option("--channels-last", help="Store images with the channels of a pixel side by side.")
    ],
}

# Options that decide the results of a study, in the order of its command; the others are settings of this machine.
_DECIDING = (
    *("self_test", "task", "model", "script", "metric", "unit", "direction", "sesoi", "seeds", "first_seed", "tune"),
    *("robust", "epsilon", *_TRAINING, "device", "output"),
)
_OF_SCORE, _OF_MODEL = ("metric", "unit", "direction", "sesoi"), ("task", "model")
_OF_TRAINING = ("tune", *_TRAINING)

_Recipes = Annotated[
    list[str] | None,
    typer.Argument(help="Built-in recipes or recipe files; default: one per method family.", metavar="RECIPE"),
]
_Task = Annotated[
    str,
    typer.Option(
        help="A built-in task (gonio list tasks), torchvision:NAME:FOLDER, imagefolder:FOLDER, or file.py:factory.",
        metavar="TASK",
    ),
]
_Model = Annotated[str | None, typer.Option(help=f"{options.MODEL_HELP}; default: the task's own.", metavar="MODEL")]
_Seeds = Annotated[int, typer.Option(help="Runs per recipe.", min=1, max=10**6, metavar="N")]
_FirstSeed = Annotated[
    int, typer.Option(help="First seed. Choose new seeds to repeat the study independently.", min=0, max=2**62)
]
_Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:N or mps; default: cpu for built-in tasks and scripts, else the accelerator.",
        metavar="DEVICE",
    ),
]
_Workers = Annotated[
    int | None, typer.Option(help="Processes that load the items of a data set, in each run.", min=0, metavar="N")
]
_Engine = Annotated[str, typer.Option(help="local, or ray for an already running Ray cluster.", metavar="ENGINE")]
_Cpus = Annotated[float, typer.Option(help="CPUs per run on a cluster.")]
_Gpus = Annotated[float | None, typer.Option(help="GPUs per run on a cluster; default: 1 with --device cuda.")]
_Tune = Annotated[
    int,
    typer.Option(
        help="Trials to tune the learning rate and the strengths (not the epochs) of every recipe and the baseline "
        "before the runs.",
        min=0,
        max=10**6,
        metavar="N",
    ),
]
_Robust = Annotated[bool, typer.Option("--robust", help="Attack the trained models and show their accuracy.")]
_Epsilon = Annotated[
    float | None, typer.Option(help="With --script: largest change of an input number by an attack.", metavar="X")
]
_SelfTest = Annotated[
    bool, typer.Option("--self-test", help="Compare the baseline with itself: how often is a verdict wrong?")
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and its estimated time, and stop.")]
_Script = Annotated[
    str | None, typer.Option(help="Your own training, instead of TASK and MODEL.", metavar="FILE.py:FUNCTION")
]
_Metric = Annotated[str, typer.Option(help="Name of a script's score.")]
_Unit = Annotated[str, typer.Option(help="Unit of a script's score, for example %.")]
_Direction = Annotated[str, typer.Option(help="Whether a larger (max) or smaller (min) score of a script is better.")]
_Sesoi = Annotated[float, typer.Option(help="Smallest effect of interest on a script's score.", min=0)]
_RunTimeout = Annotated[
    float | None,
    typer.Option(
        help="Stop a run after this many seconds; it counts as failed. Default: never.", min=1, metavar="SECONDS"
    ),
]
_Study = Annotated[Path, typer.Option("-o", "--output", help="The study's folder.", metavar="STUDY")]


def _takes_training(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a training; its argument `training` holds those that were named."""

    def run(*arguments: Any, **named: Any) -> None:
        training = {name: value for name in _TRAINING if (value := named.pop(name)) is not None}
        command(*arguments, training=training, **named)

    return options.declared_like(command, run, _TRAINING, but="training")


@_takes_training
def compare(
    context: typer.Context,
    recipes: _Recipes = None,
    *,
    task: _Task = "digits",
    model: _Model = None,
    seeds: _Seeds = 8,
    first_seed: _FirstSeed = 0,
    jobs: options.Runs = None,
    engine: _Engine = "local",
    cpus: _Cpus = 1.0,
    gpus: _Gpus = None,
    device: _Device = None,
    workers: _Workers = None,
    training: dict[str, Any],
    tune: _Tune = 0,
    robust: _Robust = False,
    epsilon: _Epsilon = None,
    self_test: _SelfTest = False,
    dry_run: _DryRun = False,
    script: _Script = None,
    metric: _Metric = "score",
    unit: _Unit = "",
    direction: _Direction = "max",
    sesoi: _Sesoi = 0.0,
    run_timeout: _RunTimeout = None,
    output: _Study = Path("gonio-study"),
) -> None:
    """Train recipes and the unchanged model with equal budgets, and test the differences.

    Without arguments: the built-in study, on handwritten digits. Rerun the same command to resume a study; more
    seeds or recipes are added to it.
    """
    defaults = {parameter.name: parameter.default for parameter in context.command.params}
    given = {name: value for name in _DECIDING if (value := context.params[name]) != defaults[name]}
    _check(context, recipes or [], given)
    _check_engine(engine, cpus, gpus)
    if engine == "local" and not dry_run:
        from gonio.lab.running.engines.local import server_running

        with server_running("gonio.cli"):  # its imports take as long as those of this process
            pass
    from gonio import lab

    devices = _devices(device, given, on_cpu=script is not None or task in lab.tasks.BUILT_IN)
    command, drawn = _command(recipes or [], given), range(first_seed, first_seed + seeds)
    chosen = [] if self_test else recipes or None
    with users_code(task, model):
        if script is not None:
            score = {name: context.params[name] for name in _OF_SCORE}
            plan = lab.make_script_plan(
                chosen, script=script, seeds=drawn, epsilon=epsilon, device=devices.kind, command=command, **score
            )
        else:
            plan = lab.make_plan(
                chosen, task=task, model=model, seeds=drawn, tune=tune, robust=robust, command=command,
                training=training, device=devices.kind, workers=workers,
            )  # fmt: skip
    if self_test:
        plan = lab.self_test_plan(plan, size=len(drawn))
    if dry_run:
        _show_plan(plan, output, jobs)
    else:
        _run(plan, output, _engine(engine, jobs, cpus, gpus, devices), run_timeout=run_timeout)


def _check(context: typer.Context, recipes: list[str], given: Mapping[str, Any]) -> None:
    """Refuse options that cannot be combined, before the first run."""
    if "self_test" in given and recipes:
        named = ", ".join(recipes)
        raise InvalidArgumentError("--self-test compares the baseline with itself", named, "Name no recipe.")
    if "script" not in given and not given.keys().isdisjoint(_OF_SCORE):
        what = "--metric, --unit, --direction and --sesoi describe the score of a script"
        raise InvalidArgumentError(what, "no --script", "A task has its own; leave them out.")
    if "script" in given:
        options.refuse_unused(context, "workers", say("--script, which loads its own data"))
    if "script" in given and not given.keys().isdisjoint(_OF_TRAINING):
        named = ", ".join(_option(name) for name in given if name in _OF_TRAINING)
        raise InvalidArgumentError(
            say("{named}: the training is gonio's", named=named), "--script beside it", "Leave it out."
        )
    if ("script" in given and "robust" in given) != ("epsilon" in given):
        what = "--robust with --script needs --epsilon, and --epsilon needs both"
        raise InvalidArgumentError(what, "one without the other", "Write e.g. --robust --epsilon 0.03.")
    if "script" in given and not given.keys().isdisjoint(_OF_MODEL):
        raise InvalidArgumentError("--script trains its own model", "--task or --model beside it", "Leave them out.")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _devices(name: str | None, given: dict[str, Any], *, on_cpu: bool) -> Devices:
    """The devices of the study; an accelerator that was found becomes part of its command.

    Args:
        on_cpu: without a name; a script chooses for itself, and may not even look at run.device.
    """
    from gonio.lab.running.engines import Devices

    found = Devices.named("cpu" if name is None and on_cpu else name)
    if found.kind != "cpu":
        given.setdefault("device", found.kind)
    return found


def _command(recipes: list[str], given: Mapping[str, Any]) -> str:
    """The command that reproduces the study."""
    words = ["gonio", "compare", *recipes]
    for name, value in given.items():
        words.append("-o" if name == "output" else _option(name))
        words += [] if value is True else [str(value)]
    return shlex.join(words)


def _show_plan(plan: StudyPlan, study: Path, jobs: int | None) -> None:
    """What would be run, and the changes that each recipe would make to the model."""
    from gonio import lab
    from gonio.cli.inputs import build_model
    from gonio.lab.plan import extended
    from gonio.recipes import Recipe

    if (study / "plan.json").exists():
        extended(lab.Study.open(study).plan, plan, path=str(study), finished=0)  # refuses another plan
    print_out(
        say(
            "study {study}\n{dry_run}\n",
            study=study,
            dry_run=lab.dry_run(plan, jobs=jobs or lab.engines.default_jobs()),
        )
    )
    if not plan.scripted:
        model = build_model(plan.model, **lab.tasks.resolve(plan.task).sizes)
        print_out("\n\n".join(str(Recipe.from_dict(entry.content).plan(model)) for entry in plan.recipes[1:]))


def _check_engine(name: str, cpus: float, gpus: float | None) -> None:
    """Refuse an engine that does not exist, and settings of a cluster without one."""
    if name not in ("local", "ray"):
        raise UnknownNameError("engine", name, ["local", "ray"])
    if name == "local" and (cpus, gpus) != (1.0, None):
        raise InvalidArgumentError("--cpus and --gpus need --engine ray", "--engine local", "Leave them out.")


def _engine(name: str, jobs: int | None, cpus: float, gpus: float | None, devices: Devices) -> Engine:
    from gonio.lab.running.engines import Local, Ray

    if name == "ray":
        return Ray(cpus=cpus, gpus=float(devices.kind == "cuda") if gpus is None else gpus, jobs=jobs)
    return Local(jobs, devices)


def _run(plan: StudyPlan, study: Path, engine: Engine, *, run_timeout: float | None) -> None:
    """Run the study, show the verdicts and write the page; exit with 4 if runs failed or are missing."""
    from gonio import lab
    from gonio.lab.showing import text, write_html

    recipes, seeds = counted(len(plan.recipes), "recipe"), counted(len(plan.seeds), "seed")
    size = say("{recipes} (with the baseline) × {seeds}", recipes=recipes, seeds=seeds)
    print_err(
        say(
            "study {study}: {size} = {runs}; --dry-run estimates the time",
            study=study,
            size=size,
            runs=counted(len(plan.grid), "run"),
        )
    )
    watcher = lab.watcher_for(sys.stderr)
    results = lab.run(plan, study, engine=engine, watcher=watcher, run_timeout=run_timeout).results()
    show(text(results))
    print_out(say("\npage: {page}", page=write_html(results, study / "report.html")))
    if plan.self_test:
        tested = lab.self_test(results)
        print_out(f"\n{tested}")
        if not tested.passed:
            raise typer.Exit(ExitCode.FINDING)
    refused = sum(run.refused for run in results.runs)
    exit_if_partial(len(results.runs), failed=results.failed, refused=refused, missing=results.missing)


def exit_if_partial(done: int, *, failed: int, refused: int, missing: int) -> None:
    """Exit with 4 if runs failed, of so many that were done, or are missing; those that gonio refused fail again."""
    runs = counted(done, "run")
    if lost := failed - refused:
        print_err(say("{failed} of {runs} failed; rerun the same command to try again", failed=lost, runs=runs))
    if refused:
        print_err(
            say("runs that were refused, as they would be again: {refused} of {runs}", refused=refused, runs=runs)
        )
    if failed or missing:
        raise typer.Exit(ExitCode.PARTIAL)
