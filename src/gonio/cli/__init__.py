"""The command line: one file per command.

Only here may a function import parts of gonio: `--help`, `--version` and a mistyped option must
answer at once, and torch alone takes a second to import. So the top of each file imports typer and
the light modules (errors, exit codes), and a command's function imports what it runs.
"""

from gonio.cli.app import app, main

__all__ = ["app", "main"]
