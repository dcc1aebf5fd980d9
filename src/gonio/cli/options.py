"""Options that several commands share, and those of `gonio measure`, each declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import wraps
from typing import Annotated, Any, Literal

import typer

from gonio.errors import InvalidArgumentError
from gonio.messages import say, speak

MODEL_HELP = "timm:NAME, torchvision:NAME, transformers:NAME, a built-in name, or file.py:factory"

Recipe = Annotated[str, typer.Argument(help="A built-in recipe or a recipe file.", metavar="RECIPE")]
Checkpoint = Annotated[
    str,
    typer.Argument(
        help="State dict of the model: .safetensors, .pt, …, an index of shards, or a folder.", metavar="CKPT"
    ),
]
Model = Annotated[str, typer.Option(help=f"{MODEL_HELP}.", metavar="MODEL")]
Output = Annotated[str, typer.Option("-o", "--output", help="Output file (.safetensors, .pt, .pth).", metavar="OUT")]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers.", min=0, max=2**62, metavar="N")]
BATCH = typer.Option(
    help="An input of the model: a shape such as 2x3x224x224 for random numbers, or a file.", metavar="SHAPE|FILE"
)
Batch = Annotated[str | None, BATCH]
Html = Annotated[str | None, typer.Option(help="Write one self-contained page to FILE (- for stdout).", metavar="FILE")]
Json = Annotated[str | None, typer.Option(help="Write everything as JSON.", metavar="FILE")]
Csv = Annotated[str | None, typer.Option(help="Write one line per row as CSV.", metavar="FILE")]
Md = Annotated[str | None, typer.Option(help="Write the tables as markdown.", metavar="FILE")]
Tex = Annotated[str | None, typer.Option(help="Write the tables as LaTeX.", metavar="FILE")]


Runs = Annotated[
    int | None,
    typer.Option(
        "--jobs", help="Runs at the same time, on each GPU; default: one per core or GPU.", min=1, metavar="J"
    ),
]  # of a study


def _speak(value: str | None) -> str | None:
    if value is not None:
        speak(value)
    return value


Lang = Annotated[
    Literal["en", "zh"] | None,
    typer.Option(
        "--lang",
        help="Language of help, tables, findings, pages and errors; default: the environment's (LC_ALL, LANG).",
        is_eager=True,
        callback=_speak,
    ),
]


def with_language(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the option `--lang`, which all commands have."""

    def run(lang: Lang = None, **options: Any) -> None:
        command(**options)

    return declared_like(command, run, {"lang": Lang})


def declared_like(
    command: Callable[..., None], run: Callable[..., None], further: Mapping[str, Any], *, but: str = ""
) -> Callable[..., None]:
    """`run` with the name, the help and the options of a command, but one of them, and with further options."""
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != but]
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in further.items()]
    made = wraps(command)(run)
    made.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    made.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *added]}
    del made.__wrapped__
    return made


def source_of(context: Any, parameter: str) -> str:
    """Where the value of a parameter comes from, as click calls it; empty where it does not know."""
    source = context.get_parameter_source(parameter)
    return "" if source is None else str(source.name)


def refuse_unused(context: typer.Context, parameter: str, needs: str) -> None:
    """Refuse an option that has no effect where it is named; one that a file sets, or a default, need not have one."""
    if source_of(context, parameter) == "COMMANDLINE":
        asked = say("{option} has no effect here", option=f"--{parameter.replace('_', '-')}")
        raise InvalidArgumentError(asked, needs, "Leave it out.")


# --- gonio measure ---------------------------------------------------------------------------------


Engine = Literal["local", "ray"]
Level = Literal["info", "warn", "error"]  # lowest first


class Figure(StrEnum):
    """Figures that are measured on request only; an Enum, because typer cannot parse list[Literal]."""

    operator_norm = "operator_norm"
    quantisation = "quantisation"
    blocks = "blocks"


Source = Annotated[
    str,
    typer.Argument(
        help=f"{MODEL_HELP}; or a checkpoint (.safetensors, .pt, …) or a folder with one.", metavar="MODEL|FILE"
    ),
]
After = Annotated[
    list[str] | None,
    typer.Argument(help="Checkpoints or adapters: report their changes from the first.", metavar="AFTER"),
]
OfCheckpoint = Annotated[
    str | None,
    typer.Option(
        help="The model of the checkpoint: measure its structure too, and with --batch its signals.", metavar="MODEL"
    ),
]
Base = Annotated[
    str | None,
    typer.Option(help="The base model of low-rank adapters: measure the adapted weights too.", metavar="MODEL|FILE"),
]
Key = Annotated[
    str | None,
    typer.Option(help="Which state dict of a checkpoint to read, where it holds several; e.g. generator or ema.model."),
]
Headers = Annotated[bool, typer.Option("--headers", help="Show shapes, dtypes and sizes only; no values are read.")]
Where = Annotated[Engine, typer.Option(help="ray spreads the tensors of files over a running cluster.")]
Jobs = Annotated[int, typer.Option(help="Of a file: measure its tensors in N processes.", min=1, metavar="N")]
Journal = Annotated[
    str | None,
    typer.Option(
        help="Of a file: keep each row in FILE when it is made, so that a stopped measurement goes on from there.",
        metavar="FILE",
    ),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Measure anew even if this content was measured with the same settings.")
]
Also = Annotated[
    list[Figure] | None, typer.Option(help="Measure this too; operator_norm takes longer than all the rest.")
]
Deep = Annotated[
    bool, typer.Option("--deep", help="All pairs and all singular values of large weights too, however long it takes.")
]
FailOn = Annotated[Level | None, typer.Option(help="Exit with 1 if there is a finding of this level or above.")]
Ignore = Annotated[
    list[str] | None, typer.Option(help="Suppress the findings of this rule; repeatable, or G101,G202.", metavar="CODE")
]
Widths = Annotated[
    str | None,
    typer.Option(
        "--widths",
        help="Widths joined by commas: how activations and changes by training scale with them.",
        metavar="N,N,…",
    ),
]
Task = Annotated[
    str,
    typer.Option("--task", help="With --widths: a task of gonio compare, whose data the models see.", metavar="TASK"),
]
Config = Annotated[
    str | None,
    typer.Option(
        help="Configuration file; default: the nearest gonio.toml, or pyproject.toml with [tool.gonio], in the "
        "working directory or above.",
        metavar="FILE",
    ),
]
