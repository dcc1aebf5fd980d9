"""`gonio measure`: norms, angles and spectra of a model or checkpoint, against chance."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gonio.cli.exits import ExitCode
from gonio.cli.screen import deliver, put, say

if TYPE_CHECKING:
    from torch import nn

    from gonio.measuring import Measurements

__all__ = ["Level", "command"]


class Level(StrEnum):
    """How bad a finding is, from the mildest."""

    info = "info"
    warn = "warn"
    error = "error"


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="timm:NAME, torchvision:NAME, transformers:NAME, a built-in name, file.py:factory; or a checkpoint "
            "(.safetensors, .pt, …) or a folder that holds one.",
            metavar="MODEL|FILE",
        ),
    ],
    *,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            help="Measure the signals of this input too: a shape such as 2x3x224x224, or a file.",
            metavar="SHAPE|FILE",
        ),
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", help="Write one self-contained page there; - is stdout.", metavar="FILE")
    ] = None,
    json: Annotated[
        str | None, typer.Option("--json", help="Write everything as JSON there; - is stdout.", metavar="FILE")
    ] = None,
    fail_on: Annotated[
        Level | None, typer.Option("--fail-on", help="Exit with 1 if there is a finding of this level or above.")
    ] = None,
) -> None:
    """Measure norms, angles and spectra of the weights, each beside what random weights would show.

    Checkpoints are read as data: no code in them runs.
    """
    from gonio.cli.progress import counting
    from gonio.measuring import measure

    measured = _source(source)
    example = _batch(batch, measured)
    with counting("measuring") as progress:
        found = measure(measured, batch=example, progress=progress)
    if html is not None:
        deliver(found.to_html(), html, "page")
    if json is not None:
        deliver(found.to_json(), json, "JSON")
    if html is None and json is None:
        put(str(found))
    _fail(found, fail_on)


def _source(words: str) -> str | nn.Module:
    """A path where there is a file or the words look like one, otherwise a model."""
    from gonio.cli.inputs import build_model
    from gonio.models.user_code import is_user_code

    path = Path(words)
    file_like = path.exists() or path.suffix in (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".json")
    return words if file_like and not is_user_code(words) else build_model(words)


def _batch(words: str | None, measured: str | nn.Module) -> Any:
    """The input, tried on the model."""
    if words is None:
        return None
    from gonio.cli.batch import check_runs, read_batch

    example = read_batch(words, option="--batch")
    if not isinstance(measured, str):
        check_runs(measured, example, option="--batch")
    return example


def _fail(found: Measurements, fail_on: Level | None) -> None:
    if fail_on is None:
        return
    levels = list(Level)
    counted = [finding for finding in found.findings if levels.index(Level(finding.level)) >= levels.index(fail_on)]
    if counted:
        say(f"{len(counted)} findings at or above {fail_on}")
        raise typer.Exit(ExitCode.FINDING)
