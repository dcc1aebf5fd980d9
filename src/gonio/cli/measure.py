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


class Engine(StrEnum):
    """Where tensors are measured."""

    local = "local"
    ray = "ray"


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
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            help="Of low-rank adapters: the model that they adapt, whose weights and sums are measured too.",
            metavar="MODEL|FILE",
        ),
    ] = None,
    headers: Annotated[
        bool, typer.Option("--headers", help="Shapes, dtypes and sizes only: no value is read, whatever the size.")
    ] = False,
    engine: Annotated[
        Engine, typer.Option("--engine", help="ray spreads the tensors of a file over a cluster that runs.")
    ] = Engine.local,
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
    if headers:
        _outline(measured, json, {"--batch": batch, "--html": html, "--base": base, "--fail-on": fail_on})
        return
    example = _batch(batch, measured)
    with counting("measuring") as progress:
        adapted = None if base is None else _source(base)
        found = measure(measured, batch=example, base=adapted, engine=engine.value, progress=progress)
    if html is not None:
        deliver(found.to_html(), html, "page")
    if json is not None:
        deliver(found.to_json(), json, "JSON")
    if html is None and json is None:
        put(str(found))
    _fail(found, fail_on)


def _outline(measured: str | nn.Module, json: str | None, ignored: dict[str, Any]) -> None:
    """The headers as a table, or as JSON; options that ask for values are refused."""
    from json import dumps

    from gonio.measuring import outline

    given = [name for name, value in ignored.items() if value is not None]
    if given:
        raise typer.BadParameter("no value is read, so that it has no meaning here", param_hint=f"--headers {given[0]}")
    found = outline(measured)
    if json is not None:
        deliver(dumps(found.to_dict(), ensure_ascii=False, indent=1) + "\n", json, "JSON")
    else:
        put(str(found))


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
