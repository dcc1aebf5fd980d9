"""The arguments and options that several commands share, each declared once."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Batch", "Checkpoint", "Csv", "Html", "Json", "Md", "Model", "Output", "Recipe", "Seed", "Tex"]

MODEL_HELP = "timm:NAME, torchvision:NAME, transformers:NAME, a built-in name, or file.py:factory"

Recipe = Annotated[str, typer.Argument(help="A built-in recipe or a recipe file.", metavar="RECIPE")]
Checkpoint = Annotated[str, typer.Argument(help="State dict of the model (.safetensors, .pt, .pth).", metavar="CKPT")]
Model = Annotated[str, typer.Option("--model", help=f"{MODEL_HELP}.", metavar="MODEL")]
Output = Annotated[str, typer.Option("-o", "--output", help="Output file (.safetensors, .pt, .pth).", metavar="OUT")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the random numbers.", min=0, max=2**62, metavar="N")]
Batch = Annotated[
    str | None,
    typer.Option(
        "--batch",
        help="An input of the model: a shape such as 2x3x224x224 for random numbers, or a file.",
        metavar="SHAPE|FILE",
    ),
]
Html = Annotated[
    str | None, typer.Option("--html", help="Write one self-contained page to FILE (- for stdout).", metavar="FILE")
]
Json = Annotated[str | None, typer.Option("--json", help="Write everything as JSON.", metavar="FILE")]
Csv = Annotated[str | None, typer.Option("--csv", help="Write one line per row as CSV.", metavar="FILE")]
Md = Annotated[str | None, typer.Option("--md", help="Write the tables as markdown.", metavar="FILE")]
Tex = Annotated[str | None, typer.Option("--tex", help="Write the tables as LaTeX.", metavar="FILE")]
