"""The page of the command line names every command, argument and option, and no other option."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli.shell import invoke
from gonio.cli import app
from gonio.cli.group import ExitCode

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
COMMANDS = sorted(command.name for command in app.registered_commands)
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_its_place_and_all_its_options(name: str) -> None:
    assert re.search(rf"^## .*\bgonio {name}\b", PAGE, flags=re.M)
    listed = invoke(name, "--help").stdout.partition("Options:")[2]
    options = {word for line in listed.splitlines() for word in OPTION.findall(line.split("   ")[0])} - {"--help"}
    assert options <= set(OPTION.findall(PAGE))


def test_no_option_is_made_up() -> None:
    helps = " ".join(invoke(name, "--help").stdout for name in COMMANDS) + invoke("--help").stdout
    assert set(OPTION.findall(PAGE)) <= set(OPTION.findall(helps)) | {"-a", "-m"}


def test_every_exit_code_is_listed() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, flags=re.M)}
    assert listed == {int(code) for code in ExitCode}
