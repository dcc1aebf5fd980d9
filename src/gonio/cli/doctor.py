"""`gonio doctor`: treat the findings of a model, and keep what is proved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gonio.cli import options
from gonio.cli.app import check_folder, check_folders, made_now, print_err, print_out, save, users_code
from gonio.cli.measure import fail_at
from gonio.errors import InvalidArgumentError
from gonio.messages import say

if TYPE_CHECKING:
    from gonio.cli.checkpoint import Checkpoint
    from gonio.lab import Treatment
    from gonio.lab.treating.treatment import TreatmentStep

CHECKPOINT, STEPS, PAGE, PROOFS = "treated.safetensors", "treatment.json", "treatment.html", "proofs"
Folder = Annotated[
    Path | None,
    typer.Option("-o", "--output", help=f"Write {CHECKPOINT}, {STEPS} and {PAGE} into this folder.", metavar="FOLDER"),
]
Task = Annotated[
    str | None, typer.Option(help="A task of gonio compare: its held-out score proves a treatment.", metavar="TASK")
]
Base = Annotated[
    str | None,
    typer.Option(
        help="The checkpoint that this one was fine-tuned from: what has changed is judged too.", metavar="FILE"
    ),
]
Unproven = Annotated[
    bool, typer.Option("--unproven", help="Keep a treatment that can be neither proved nor refuted without a task.")
]


def doctor(
    context: typer.Context,
    source: options.Source,
    *,
    model: options.OfCheckpoint = None,
    task: Task = None,
    batch: options.Batch = None,
    base: Base = None,
    key: options.Key = None,
    output: Folder = None,
    json: options.Json = None,
    seed: options.Seed = 0,
    unproven: Unproven = False,
    fail_on: options.FailOn = None,
) -> None:
    """Treat the findings of a model on a copy: apply, measure again, prove, and keep or undo.

    A checkpoint needs --model, its architecture; without it treatments are only named. The source is never overwritten.
    --fail-on counts the findings that are left.
    """
    import gonio
    from gonio.cli.checkpoint import read, restored_model
    from gonio.cli.inputs import check_runs, read_input, read_source
    from gonio.measuring.reading.source import name_of

    check_folders({"json": json}, [source, model, task, batch, base])
    _check_output(output, [source, base])
    held = None if model is None else read(source, key=key)
    first: Any = (
        read_source(source, seed=seed, key=key) if held is None or model is None else restored_model(held, model)
    )
    alone = isinstance(first, (str, os.PathLike))
    if held is not None or alone:
        options.refuse_unused(context, "seed", say("files alone, whose weights are not random"))
    else:
        options.refuse_unused(context, "key", say("no checkpoint, which may hold several state dicts"))
    if alone and (task or batch or base or unproven):
        option = "--task" if task else "--batch" if batch else "--base" if base else "--unproven"
        raise InvalidArgumentError(
            say("{option} needs the model of the checkpoint", option=option),
            "a file alone",
            "Add --model FILE.py:FACTORY.",
        )
    example = None if batch is None else read_input(batch)
    if example is not None:
        check_runs(first, example)
    with users_code(task, model, source):
        before = None if base is None else _base(base, key)
        treated = gonio.doctor(first, task=task, batch=example, base=before, apply_unproven=unproven)
    treated = replace(treated, steps=_in_options(treated), source=treated.source if held is None else name_of(source))
    if json is None:
        print_out(str(treated))
    else:
        save(dumps(treated.to_dict(), ensure_ascii=False, allow_nan=False, indent=1), json, "JSON")
    if output is not None:
        _write(treated, output, held)
    fail_at(treated.after.findings, fail_on)


def _base(path: str, key: str | None) -> Mapping[str, Any]:
    """The tensors of the base; under the key, too, where it holds several state dicts."""
    from gonio.cli.checkpoint import read

    try:
        return read(path).state
    except InvalidArgumentError:
        if key is None:
            raise
        return read(path, key=key).state


def _in_options(treated: Treatment) -> tuple[TreatmentStep, ...]:
    """The steps, with options in the place of arguments where a reason names them."""
    from gonio.lab.treating import doctor as reasons

    options: dict[str, str] = {
        reasons.UNPROVABLE: say(
            "not provable without data: add --task, or --batch FILE (training inputs) and --unproven"
        ),
        reasons.NEEDS_TASK: say("not provable without data: add --task, whose training data it takes"),
        reasons.NO_DATA: say(
            "refused: it averages over data, and --batch SHAPE means random numbers; add --task, or --batch FILE "
            "(training inputs)"
        ),
        reasons.NO_EVIDENCE: say(
            "refused: its findings are of outputs on random numbers; add --task, or --batch FILE (training inputs) to "
            "see whether they are there on data"
        ),
        reasons.NO_MODULES: say("it takes the model's modules: add --model FILE.py:FACTORY"),
    }
    return tuple(replace(step, proof=options.get(step.proof, step.proof)) for step in treated.steps)


def _check_output(output: Path | None, reads: Sequence[str | None]) -> None:
    """Refuse a folder that holds a result already, or a model that is read, so that nothing is overwritten or doubled.

    The report of a run that kept nothing, and compared nothing, is none: the next one takes its place.
    """
    if output is None:
        return
    check_folder(str(output))
    asked = say("-o takes a folder for new results, not {output!r}", output=str(output))
    if any(output.is_dir() and Path(word).is_dir() and output.samefile(word) for word in filter(None, reads)):
        raise InvalidArgumentError(asked, say("the folder of a model that this command reads"), "Name another.")
    there = [name for name in (CHECKPOINT, STEPS, PAGE, PROOFS) if (output / name).exists()]
    if {CHECKPOINT, PROOFS}.isdisjoint(there) and _kept_nothing(output / STEPS):
        return
    if there or (output.exists() and not output.is_dir()):
        found = f"{', '.join(there)} in it" if there else "a file"
        raise InvalidArgumentError(asked, found, "Name another.")


def _kept_nothing(steps: Path) -> bool:
    """Whether this is the file of a treatment, and none of its steps was kept."""
    from gonio.lab.treating.treatment import SCHEMA

    try:
        content = loads(steps.read_text(encoding="utf-8"))
        return bool(content["schema"] == SCHEMA) and all(step["verdict"] != "kept" for step in content["steps"])
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return False


def _write(treated: Treatment, output: Path, held: Checkpoint | None) -> None:
    """The page and the steps; the weights only if a step was kept."""
    from gonio.cli.checkpoint import Checkpoint, write

    output.mkdir(exist_ok=True)
    treated.page(output / PAGE, **made_now())
    save(dumps(treated.to_dict(), ensure_ascii=False, allow_nan=False, indent=1), str(output / STEPS), "treatment")
    if treated.studies(output / PROOFS):
        print_err(say("studies behind the proofs written to {folder}", folder=output / PROOFS))
    if treated.model is None or not treated.kept:
        print_err(say("no checkpoint was written, because no treatment was kept"))
        return
    recipe, seed = (None, 0) if held is None else (held.recipe, held.seed)
    target = output / CHECKPOINT
    write(Checkpoint(str(target), treated.model.state_dict(), recipe, seed), held)
    print_err(say("checkpoint written to {target}", target=target))
