"""`--help`, titles of columns and the tables of doctor, plan and cost in Chinese, aligned as a terminal shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.main import get_command

import gonio
from cli.shell import invoke
from gonio.cli import app
from gonio.cli.helping import LocalFormatter, wrapped
from gonio.escaping import aligned, display_width
from gonio.lab.running.step_cost import AGAIN
from gonio.measuring.explaining import TABLES
from gonio.messages import local

COMMANDS = sorted(str(command.name) for command in app.registered_commands)
NETS = """
from torch import nn


def scaled():
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    for layer, factor in ((model[0], 1000.0), (model[2], 0.001)):
        layer.weight.data.mul_(factor)
        layer.bias.data.mul_(factor)
    return model
"""


CHINESE = re.compile(r"[\u4e00-\u9fff]")
# Words that are in no name and in no value of an option.
ENGLISH = re.compile(r"(?<![\w-])(the|an?|of|is|are|with|for|and|or|in|to|that|from|by|it|this)(?![\w-])")


def edges(lines: list[str]) -> list[set[int]]:
    """Where the words of each line end, in columns of a terminal."""
    return [{display_width(line[: word.end()]) for word in re.finditer(r"\S+(?: \S+)*", line)} for line in lines]


# --- the width of text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "width"), [("", 0), ("norm", 4), ("范数", 4), ("σ/σ₀", 4), ("é", 1), ("（a）", 5)])
def test_the_width_of_a_text_is_what_a_terminal_takes(text: str, width: int) -> None:
    from rich.cells import cell_len

    assert display_width(text) == width == cell_len(text)


def test_columns_of_mixed_text_are_aligned() -> None:
    lines = aligned([("范数", "最小", "x"), ("conv1", "1", "y")], right=[1])
    assert lines == ["范数   最小  x", "conv1     1  y"]
    assert [display_width(line) for line in lines] == [14, 14]


@pytest.mark.parametrize("width", [10, 23, 40])
def test_chinese_is_wrapped_by_its_width(width: int) -> None:
    text = "测量权重的范数、夹角和谱，并与 random weights 比较（见 G001）。"
    lines = list(wrapped(text, width))
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert max(map(display_width, lines)) <= width
    assert all(line[0] not in "，。、）" for line in lines)
    assert len(lines) <= 1 + 2 * display_width(text) // width


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_is_in_chinese(name: str) -> None:
    shown = invoke(*filter(None, [name]), "--help", "--lang", "zh").stdout
    lines = shown.splitlines()
    assert lines[0].startswith(f"用法：gonio {name}".rstrip())
    assert "选项：" in lines
    assert max(map(display_width, lines)) <= 100
    assert [line for line in lines if ENGLISH.search(line)] == []


def test_the_environment_and_the_program_s_own_option_choose_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = invoke("--lang", "zh", "--help").stdout
    assert invoke("explain", "G001", "--lang", "zh").stdout == invoke("--lang", "zh", "explain", "G001").stdout
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert invoke("--help").stdout == chosen


def test_help_is_aligned_in_chinese() -> None:
    lines = invoke("--help", "--lang", "zh").stdout.partition("命令：\n")[2].splitlines()
    starts = {len(line) - len(re.sub(r"^\s*\S+\s+", "", line)) for line in lines if re.match(r"  \S", line)}
    assert len(lines) >= len(COMMANDS)
    assert len(starts) == 1


def test_defaults_and_what_is_required_are_in_chinese() -> None:
    shown = invoke("cost", "--help", "--lang", "zh").stdout
    assert "[必填]" in shown
    assert "[默认：20.0；x>=0.0]" in shown
    assert "[默认：0；0<=x<=4611686018427387904]" in shown, "what is in brackets is not divided"


def test_english_help_is_that_of_typer() -> None:
    program: Any = get_command(app)
    for command in (program, *program.commands.values()):
        context = typer.Context(command, info_name=command.name, max_content_width=100, terminal_width=100)
        stock = typer.Context.formatter_class(width=100, max_width=100)
        command.format_help(context, stock)
        assert command.get_help(context) == stock.getvalue().rstrip("\n")
        assert isinstance(stock, LocalFormatter) is False


@pytest.mark.parametrize("kind", ["recipes", "tasks", "models", "rules", "columns", "claims"])
def test_lists_are_in_chinese(kind: str) -> None:
    chinese, english = (invoke("list", kind, "--lang", lang).stdout.splitlines() for lang in ("zh", "en"))
    assert len(chinese) == len(english)
    assert [line for line in chinese if not CHINESE.search(line) or ENGLISH.search(line)] == []
    assert not any(map(CHINESE.search, english))


# --- columns ----------------------------------------------------------------------------------------------------------

SAME = {"n", "d", "z", "σ/σ₀", "int8", "int4", "int4 128", "int4 32"}  # in both languages


def test_every_title_of_a_column_has_a_chinese_one() -> None:
    titles = [column.title for table in TABLES.values() for column in table]
    with gonio.language("zh"):
        assert {title for title in titles if local(title) == title} <= SAME
        for table in TABLES.values():
            shown = [local(column.title) for column in table]
            assert {title for title in shown if shown.count(title) > 1} <= {"随机水平"}


def test_a_table_in_chinese_is_aligned() -> None:
    torch.manual_seed(0)
    found = gonio.measure(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)), batch=torch.randn(8, 32))
    with gonio.language("zh"):
        lines = str(found).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("层 "))
    ends = edges(lines[first : first + 3])
    assert ends[0] - {2} == ends[1] - {1} == ends[2] - {1}
    assert max(map(display_width, lines[first : first + 3])) <= 100
    assert not {"norm", "angle", "chance", "align", "shape"} & {*lines[first].split()}
    signals = next(line for line in lines if line.startswith("输出 "))
    assert {"增益", "死单元", "梯度"} <= {*signals.split()}


@pytest.mark.parametrize(("name", "title"), [("对齐度", "对齐度"), ("align", "对齐度"), ("稳定秩", "稳定秩")])
def test_a_column_is_explained_by_its_chinese_title(name: str, title: str) -> None:
    result = invoke("explain", name, "--lang", "zh")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{title}")
    assert invoke("explain", title).stdout == result.stdout


def test_a_page_has_chinese_titles_and_its_script_finds_the_types() -> None:
    from html_reader import Page

    found = gonio.measure(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)))
    with gonio.language("zh"):
        page = Page(found.to_html())
    heads = [text for tag, text in page.texts if tag == "th"]
    assert {"对齐度", "夹角", "类型", "谱"} <= {*heads}
    assert not {"align", "angle", "norm", "type"} & {*heads}
    spoken = json.loads(dict(page.tags)["body"]["data-words"] or "")
    assert spoken["kind"] == "类型"


# --- tables of doctor, plan and cost ----------------------------------------------------------------------------------


def test_a_treatment_is_shown_in_chinese_and_exported_in_english(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    with torch.no_grad():
        for layer, factor in ((model[0], 1000.0), (model[2], 0.001)):
            layer.weight.mul_(factor)
            layer.bias.mul_(factor)
    treated = gonio.doctor(model, batch=torch.randn(32, 16))
    english = str(treated), json.dumps(treated.to_dict())
    with gonio.language("zh"):
        shown, page = str(treated), treated._repr_html_()
        treated.page(tmp_path / "page.html")
        assert json.dumps(treated.to_dict()) == english[1]
    assert "诊断：之前 1 条，之后 0 条。已做：balance_。" in shown
    assert "  balance_：保留（针对 G409）：前后输出：最大偏差" in shown
    assert "处理" in page
    assert '<h2 id="h-proof">处理与证明</h2>' in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert str(treated) == english[0]


def test_a_treatment_of_a_file_is_shown_in_chinese(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.zeros(4, 8), "b.weight": torch.full((4, 4), torch.nan)}, tmp_path / "a.pt")
    shown = invoke("doctor", str(tmp_path / "a.pt"), "--lang", "zh").stdout
    assert "未施行" in shown
    assert "它需要模型的模块" in shown


def test_a_plan_is_shown_in_chinese_and_aligned() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    plan = gonio.Recipe.load("switchable-norm").plan(model)
    with gonio.language("zh"):
        lines = str(plan).splitlines()
    assert lines[0] == "switchable-norm："
    assert lines[1].split() == ["动作", "规则", "层", "类型", "改变"]
    assert display_width(lines[1].partition("改变")[0]) == display_width(lines[2].partition("SwitchableNorm2d")[0])
    assert "未变：" in lines


def test_costs_are_shown_in_chinese_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    from gonio.lab.running import step_cost

    def costs(*args: object, **options: object) -> tuple[step_cost.StepCost, ...]:
        row = step_cost.StepCost(AGAIN, 1.5, (1.0, 0.9, 1.1), None, None, 1200)
        return row, step_cost.StepCost("orthogonal-init", reason="no layer fits")

    monkeypatch.setattr(step_cost, "step_costs", costs)
    words = ("cost", "orthogonal-init", "--model", "digits-cnn", "--batch", "2x1x8x8", "--lang", "zh")
    lines = invoke(*words).stdout.splitlines()
    assert lines[0].split() == ["配方", "时间", "四分位", "毫秒", "内存", "MiB", "参数"]
    assert lines[1].startswith("同样的再来一次")
    assert edges(lines[:1])[0] - {4} == edges(lines[1:2])[0] - {14}
    assert lines[2] == "orthogonal-init  未测量：no layer fits"
    assert not CHINESE.search(invoke(*words[:-2]).stdout)


def test_settings_are_shown_in_chinese() -> None:
    shown = invoke("cost", "--model", "digits-cnn", "--batch", "2x1x8x8", "--show-settings", "--lang", "zh").stdout
    assert "命令行" in shown
    assert "默认" in shown


def test_a_dry_run_is_shown_in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    monkeypatch.setattr("gonio.lab.planning.dry_run.plan_seconds", lambda plan, jobs: 60.0)
    said = gonio.lab.dry_run(gonio.lab.make_plan(["switchable-norm"], seeds=8), jobs=1)
    with gonio.language("zh"):
        shown = local(said)
    for sentence in (
        "任务 digits：",
        "基线和 1 个配方，各 8 个随机种子：16 次运行",
        "越大越好",
        "可能的最小 p",
        "约 60 s",
    ):
        assert sentence in shown
    assert not CHINESE.search(said)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_table_has_the_columns_of_the_english_one_and_says_which_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    found = gonio.measure(gonio.models.digits_cnn())
    said = f"not in {width} columns, but in exports and pages: "
    english = str(found)
    with gonio.language("zh"):
        chinese, titles = str(found), {column.title: local(column.title) for column in TABLES[""]}
    head = next(line.split() for line in english.splitlines() if line.startswith("layer "))[1:]
    shown = next(re.split(" +", line) for line in chinese.splitlines() if line.startswith("层 "))[1:]
    assert shown == [titles[title] for title in head]
    assert ("d" in shown) is (width > 80)
    out = [
        " ".join(each.split())
        for each in (english.partition(said)[2], chinese.partition(f"宽度 {width} 列放不下，但导出与页面中有：")[2])
    ]
    names = out[0].partition(" Beside trained")[0].split(", ")
    assert out[1].replace(" ", "").startswith("、".join(titles[name] for name in names).replace(" ", ""))
    assert ("d" in names) is (width == 80)
    assert {*head} | {*names} == {column.title for column in TABLES[""] if not column.requested}
    assert max(map(display_width, chinese.splitlines())) <= width


def test_what_fold_and_apply_changed_is_in_chinese(tmp_path: Path) -> None:
    torch.save(gonio.models.digits_cnn().state_dict(), tmp_path / "a.pt")
    words = ("--model", "digits-cnn", "--lang", "zh")
    folded = invoke("fold", tmp_path / "a.pt", *words, "--batch", "2x1x8x8", "-o", tmp_path / "b.pt")
    assert (folded.exit_code, folded.stdout.splitlines()[0]) == (0, "fold_：3 个模块")
    assert "BatchNorm2d 已折叠入 conv1" in folded.stdout
    assert "  说明：最大偏差 " in folded.stdout
    again = invoke("fold", tmp_path / "a.pt", *words, "-o", tmp_path / "b.pt")
    assert "未比较输出；用 --batch 比较" in again.stderr
    applied = invoke("apply", "orthogonal-init", tmp_path / "a.pt", *words, "-o", tmp_path / "c.pt")
    assert "，偏置 0" in applied.stdout
    shown = "\n".join((folded.stdout, again.stdout, applied.stdout))
    assert [line for line in shown.splitlines() if ENGLISH.search(line)] == []
    english = invoke("fold", tmp_path / "a.pt", *words[:2], "-o", tmp_path / "b.pt").stdout
    assert english.startswith("fold_: 3 modules\n")
    assert "BatchNorm2d folded into conv1" in english


def test_notes_on_layers_that_stay_are_in_chinese() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    edited = gonio.fold_(model.eval(), example=torch.randn(3, 4))
    with gonio.language("zh"):
        said = str(edited)
        assert "说明：2 保持不变：" in said
        assert "改变" in edited._repr_html_()
    assert "note: 2 stays: " in str(edited)
