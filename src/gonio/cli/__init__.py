"""The command line.

Here functions may import parts of gonio: `--help`, `--version` and a mistyped option must answer at once, and torch
alone takes a second to import. The top of a file imports typer and light modules; each command has one block of
imports of what it runs.
"""

from gonio.cli import check, compare, cost, doctor, explain, measure, recipe, report, reproduce
from gonio.cli.app import app, main
from gonio.cli.helping import Command
from gonio.cli.options import with_language
from gonio.cli.settings import COMMANDS, EPILOG

__all__ = ["app", "main"]

for _name, _command in (
    ("check", check.check),
    ("measure", measure.measure),
    ("doctor", doctor.doctor),
    ("explain", explain.explain),
    ("list", explain.list_names),
    ("plan", recipe.plan),
    ("apply", recipe.apply),
    ("fold", recipe.fold),
    ("compare", compare.compare),
    ("cost", cost.cost),
    ("reproduce", reproduce.reproduce),
    ("report", report.report),
    ("status", report.status),
):
    app.command(_name, cls=Command, epilog=EPILOG if _name in COMMANDS else None)(with_language(_command))
