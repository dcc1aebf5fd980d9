"""`gonio list`, `gonio explain` and the completion of the shell."""

from __future__ import annotations

import os
import subprocess

import pytest

from cli.shell import COMMAND, invoke
from gonio import measuring, models
from gonio.cli.explain import Listed
from gonio.lab import tasks
from gonio.lab.tasks.built_in import SOURCES
from gonio.recipes import built_in_names


def names(kind: str) -> list[str]:
    result = invoke("list", kind)
    assert result.exit_code == 0
    return [line.split()[0] for line in result.stdout.splitlines()]


def test_every_name_is_listed() -> None:
    assert names("recipes") == built_in_names()
    assert names("tasks") == [*tasks.BUILT_IN, *SOURCES, "file.py:factory"]
    assert set(models.BUILT_IN) < set(names("models"))
    whole = invoke("list").stdout
    assert [line for line in whole.splitlines() if not line.startswith(" ")] == [f"{kind}:" for kind in Listed]
    assert invoke("list", "layers").exit_code == 2


def test_every_listed_rule_and_column_is_explained() -> None:
    assert invoke("explain").stdout == invoke("list", "rules").stdout
    for code in names("rules"):
        assert invoke("explain", code.lower()).stdout.startswith(f"{code} (")
    for title in names("columns"):
        assert invoke("explain", title).stdout.startswith(f"{title}: ")
    assert invoke("explain", "alignment").stdout.startswith("align: ")


@pytest.mark.parametrize("instruction", ["bash_source", "source_bash", "zsh_source", "fish_source"])
def test_a_shell_gets_its_completion(instruction: str) -> None:
    result = subprocess.run(
        COMMAND, env={**os.environ, "_GONIO_COMPLETE": instruction}, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "_GONIO_COMPLETE=complete_" in result.stdout


def test_a_command_is_completed() -> None:
    words = {"COMP_WORDS": "gonio me", "COMP_CWORD": "1", "_GONIO_COMPLETE": "complete_bash"}
    result = subprocess.run(COMMAND, env={**os.environ, **words}, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["measure"]
    assert "--install-completion" in invoke("--help").stdout


@pytest.mark.parametrize("title", ["form", "intr.", "intr", "kept", "signs", "largest", "rank 99%", "gain", "rotation"])
def test_columns_of_every_table_are_explained(title: str) -> None:
    result = invoke("explain", title)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(title.rstrip("."))
    assert result.stdout.rstrip("\n") == measuring.explain(title)


def test_rules_are_listed_in_order_and_models_in_plain_words() -> None:
    assert names("rules") == sorted(names("rules"))
    assert ":class:" not in invoke("list", "models").stdout


@pytest.mark.parametrize(
    ("word", "said"),
    [("对齐度", "对齐度：d · 平均 cos²"), ("范数", "范数：卷积核范数的中位数"), ("NaN 或无穷大", "G001：值为")],
)
def test_a_chinese_name_is_answered_in_chinese(word: str, said: str) -> None:
    assert invoke("explain", word).stdout.startswith(said)
    assert invoke("explain", word, "--lang", "zh").stdout == invoke("explain", word).stdout
    assert invoke("explain", "align", "--lang", "zh").stdout.startswith("对齐度：")
    assert invoke("explain", "align").stdout.startswith("align: ")
    assert invoke("explain", "没有此名").exit_code == 2


def test_in_python_too() -> None:
    assert measuring.explain("对齐度").startswith("对齐度：d · 平均 cos²")
    assert measuring.explain("align").startswith("align: ")
