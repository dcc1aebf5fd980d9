"""`gonio check`: is a checkpoint intact, and what is in it."""

from __future__ import annotations

from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gonio.cli import options
from gonio.cli.app import ExitCode, check_folders, message_of, print_err, save, show
from gonio.cli.progressing import progress
from gonio.errors import InvalidArgumentError, MissingExtraError, UnreadableFileError
from gonio.messages import say

if TYPE_CHECKING:
    from torch import nn

    from gonio.measuring import CheckResult

Paths = Annotated[
    list[str],
    typer.Argument(help="Checkpoints: .safetensors, .pt, …, an index, or a folder with a model.", metavar="PATH"),
]
Save = Annotated[
    str | None, typer.Option("--save", help="Write the fingerprint of every tensor to FILE.", metavar="FILE")
]
Against = Annotated[
    str | None, typer.Option("--against", help="Report what differs from the fingerprints in FILE.", metavar="FILE")
]
Model = Annotated[
    str | None,
    typer.Option(help="Report what the checkpoint lacks, or has too much, for this model.", metavar="MODEL"),
]
Jobs = Annotated[int | None, typer.Option(help="Number of threads; by default one per core, at most 8.", min=1)]
FailOn = Annotated[options.Level, typer.Option(help="Exit with 1 if there is a finding of this level or above.")]


def check(
    paths: Paths,
    *,
    save_to: Save = None,
    against: Against = None,
    model: Model = None,
    jobs: Jobs = None,
    json: options.Json = None,
    fail_on: FailOn = "warn",
) -> None:
    """Is this checkpoint intact, and what is in it? One pass over its bytes, as fast as the disk.

    Finds damaged, missing, overlapping and cut-off tensors, NaN and infinity, zero, constant and equal rows, and
    tensors far from those of other layers. No code in a file runs.
    """
    from gonio.cli.checkpoint import model_of
    from gonio.cli.inputs import build_empty, in_cache

    if len(paths) > 1 and (save_to or against):
        option = "--save" if save_to else "--against"
        raise InvalidArgumentError(
            say("{option} takes one checkpoint", option=option),
            say("{count} of them", count=len(paths)),
            "Check them one by one.",
        )
    check_folders({"save": save_to, "json": json}, [*paths, against, model])
    built = None if model is None else build_empty(model)
    results, unread = [], 0
    for path in [in_cache(path) or path for path in paths]:
        try:
            own = None if model is None or built is None else model_of(path, model, built)
            results.append(_checked(path, against, own, jobs))
        except (UnreadableFileError, MissingExtraError, OSError) as error:
            if len(paths) == 1:
                raise
            unread += 1  # the others are checked all the same
            print_err(say("gonio: {message}", message=message_of(error)))
            continue
        if json is None:
            show(results[-1])
    if json is not None:
        made: Any = [result.to_dict() for result in results]
        save(dumps(made[0] if len(paths) == 1 else made, ensure_ascii=False, allow_nan=False, indent=1), json, "JSON")
    if save_to is not None:
        save(dumps(results[0].fingerprints, ensure_ascii=False, indent=1), save_to, "fingerprints")
    if unread:
        print_err(say("{n} of {every} checkpoints cannot be read", n=unread, every=len(paths)))
        raise typer.Exit(ExitCode.REFUSED)
    if any(result.at_least(fail_on) for result in results):
        raise typer.Exit(ExitCode.FINDING)


def _checked(path: str, against: str | None, model: nn.Module | None, jobs: int | None) -> CheckResult:
    """The check of one checkpoint, with its progress."""
    from gonio import measuring
    from gonio.pages.tables import file_size

    with progress("checking") as update:
        return measuring.check(
            path,
            against=against,
            model=model,
            jobs=jobs,
            progress=update,
            describe=lambda contents: update.about(
                say("{contents}; reading {size}", contents=contents.said, size=file_size(contents.bytes))
            ),
        )
