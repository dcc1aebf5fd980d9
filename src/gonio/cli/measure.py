"""`gonio measure`: norms, angles and spectra of a model or checkpoint, against chance."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

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


class Also(StrEnum):
    """Figures that are measured if they are asked for."""

    operator_norm = "operator_norm"


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
    after: Annotated[
        str | None,
        typer.Argument(
            help="Another one: measure what changed from the first to it, norms, angles and rank.", metavar="[AFTER]"
        ),
    ] = None,
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
    csv: Annotated[
        str | None, typer.Option("--csv", help="Write one line per tensor there; - is stdout.", metavar="FILE")
    ] = None,
    md: Annotated[
        str | None, typer.Option("--md", help="Write a markdown table there; - is stdout.", metavar="FILE")
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
    also: Annotated[
        list[Also] | None,
        typer.Option("--also", help="Measure this too, which takes longer than all the rest; several times."),
    ] = None,
    fail_on: Annotated[
        Level | None, typer.Option("--fail-on", help="Exit with 1 if there is a finding of this level or above.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore", help="Suppress the findings of this rule; several times, or G101,G202.", metavar="CODE"
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            help="Read what to suppress from this file; otherwise from the nearest gonio.toml, or pyproject.toml with "
            "[tool.gonio], upward from the working directory.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Measure norms, angles and spectra of the weights, each beside what random weights would show.

    Checkpoints are read as data: no code in them runs. Findings can be suppressed by code (ignore = ["G405"]) and by
    layer ([per-layer-ignores] with "head.*" = ["G101"]) in a configuration file; they are counted all the same.
    """
    from gonio.cli.config import suppression
    from gonio.cli.progress import counting
    from gonio.measuring import measure

    written = Written(html, json, csv, md)
    further: list[Literal["operator_norm"]] = [figure.value for figure in also or []]
    quiet = {"--ignore": ignore or None, "--config": config, "--also": also or None}
    measured = _source(source)
    if after is not None:
        _refuse(
            "two sources",
            {**_values(batch, base, fail_on), **quiet, "--headers": headers or None, "--engine": _far(engine)},
        )
        _difference(measured, _source(after), written)
        return
    if headers:
        _refuse("--headers", {**_values(batch, base, fail_on), **quiet, "--html": html, "--csv": csv, "--md": md})
        _outline(measured, json)
        return
    suppressing = suppression(config, ignore or [])
    example = _batch(batch, measured)
    with counting("measuring") as progress:
        adapted = None if base is None else _source(base)
        found = measure(measured, batch=example, base=adapted, engine=engine.value, also=further, progress=progress)
    if suppressing is not None:
        found = suppressing.applied(found, None if isinstance(measured, str) else measured)
    written.write(found)
    _fail(found, fail_on)


class Results(Protocol):
    """What can be written in every format."""

    def to_html(self) -> str: ...
    def to_json(self) -> str: ...
    def to_csv(self) -> str: ...
    def to_markdown(self) -> str: ...


@dataclass(frozen=True)
class Written:
    """Where the results go in which format; as a table on stdout where none is asked for."""

    html: str | None
    json: str | None
    csv: str | None
    md: str | None

    def write(self, found: Results) -> None:
        """Write them all."""
        asked = (
            (self.html, "page", found.to_html),
            (self.json, "JSON", found.to_json),
            (self.csv, "CSV", found.to_csv),
            (self.md, "markdown", found.to_markdown),
        )
        for target, what, made in asked:
            if target is not None:
                deliver(made(), target, what)
        if all(target is None for target, _, _ in asked):
            put(str(found))


def _values(batch: str | None, base: str | None, fail_on: Level | None) -> dict[str, Any]:
    return {"--batch": batch, "--base": base, "--fail-on": fail_on}


def _far(engine: Engine) -> str | None:
    return None if engine is Engine.local else engine.value


def _refuse(what: str, options: dict[str, Any]) -> None:
    """Options that have no meaning beside this."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise typer.BadParameter(f"it has no meaning with {what}", param_hint=given[0])


def _difference(before: str | nn.Module, after: str | nn.Module, written: Written) -> None:
    from gonio.cli.progress import counting
    from gonio.measuring import difference

    with counting("comparing") as progress:
        found = difference(before, after, progress=progress)
    written.write(found)


def _outline(measured: str | nn.Module, json: str | None) -> None:
    """The headers as a table, or as JSON."""
    from json import dumps

    from gonio.measuring import outline

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
