"""The command line.

Here functions may import parts of gonio: `--help`, `--version` and a mistyped option must answer at once, and torch
alone takes a second to import. The top of a file imports typer and light modules; each command has one block of
imports of what it runs.
"""

from gonio.cli.app import app, main

__all__ = ["app", "main"]
