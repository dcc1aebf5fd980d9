"""Help and version answer at once, without torch, and the page of the command line names every option."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gonio
from cli.shell import invoke, shell
from gonio.cli import app
from gonio.cli.app import ExitCode

COMMANDS = sorted(command.name for command in app.registered_commands)
HEAVY = ("torch", "numpy", "scipy", "yaml", "rich", "matplotlib", "jinja2", "sklearn", "sqlite3")
# Runs a command line and then prints which heavy packages it has loaded.
SPY = f"""
import sys
from gonio.cli import main
sys.argv = ["gonio", *sys.argv[1:]]
try:
    main()
finally:
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    result = subprocess.run([sys.executable, "-c", SPY, *words], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "[]\n")


@pytest.mark.parametrize("words", [["compare", "--sedes", "3"], ["plan"], ["compare", "--seeds", "many"], ["meazure"]])
def test_usage_errors_load_nothing_heavy(words: list[str]) -> None:
    result = subprocess.run([sys.executable, "-c", SPY, *words], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.endswith("[]\n")


def test_the_spy_sees_torch() -> None:
    spy = SPY.replace("main()\n", "main()\nexcept SystemExit:\n    import torch\n", 1)
    result = subprocess.run([sys.executable, "-c", spy, "--version"], capture_output=True, text=True, check=False)
    assert "torch" in result.stderr


def test_the_version_is_the_packages() -> None:
    assert invoke("--version").stdout == f"gonio {gonio.__version__}\n"


def test_no_words_are_a_usage_error_with_the_help() -> None:
    result = shell()
    assert result.returncode == 2
    assert "Usage: gonio" in result.stderr + result.stdout


def test_every_command_says_what_it_does() -> None:
    text = invoke("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in text
        assert len(invoke(name, "--help").stdout.splitlines()) > 6
    assert "..." not in text.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("check", "PATH…"),
        ("measure", "MODEL|FILE [AFTER…]"),
        ("cost", "[RECIPE…]"),
        ("apply", "RECIPE CKPT"),
        ("report", "STUDY…"),
        ("explain", "[RULE|COLUMN|CLAIM]"),
    ],
)
def test_the_usage_names_the_arguments_as_the_pages_do(name: str, words: str) -> None:
    usage, *lines = invoke(name, "--help").stdout.splitlines()
    assert usage == f"Usage: gonio {name} [OPTIONS] {words}"
    for word in words.split():
        assert any(line.startswith(f"  {word.strip('[]')}  ") for line in lines)
    assert not any("<str>" in line or "list[" in line for line in lines[lines.index("Arguments:") :][:3])


def test_the_module_is_the_program() -> None:
    result = subprocess.run([sys.executable, "-m", "gonio", "--version"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, f"gonio {gonio.__version__}\n")


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_its_place_and_all_its_options(name: str) -> None:
    assert re.search(rf"^## .*\bgonio {name}\b", PAGE, flags=re.M)
    listed = invoke(name, "--help").stdout.partition("Options:")[2]
    options = {word for line in listed.splitlines() for word in OPTION.findall(line.split("   ")[0])} - {"--help", "-h"}
    assert options <= set(OPTION.findall(PAGE))


def test_no_option_is_made_up() -> None:
    helps = " ".join(invoke(name, "--help").stdout for name in COMMANDS) + invoke("--help").stdout
    assert set(OPTION.findall(PAGE)) <= set(OPTION.findall(helps)) | {"-a", "-m"}


def test_every_exit_code_is_listed() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, flags=re.M)}
    assert listed == {int(code) for code in ExitCode}
