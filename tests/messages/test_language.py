"""Messages in the language of the reader: what is shown, what stays English, and that nothing leaks."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import gonio
from cli.shell import invoke
from gonio.cli.app import asked_language
from gonio.escaping import printed
from gonio.lab import showing
from gonio.lab.claims import judge_claims, load_claim
from gonio.lab.showing.claims import claims_html
from gonio.languages import language_of
from gonio.messages import Message, fixed, joined, local, recognised, say
from html_reader import Page


def is_chinese(text: str) -> bool:
    return any("\u4e00" <= c <= "\u9fff" for c in text)


def damaged() -> gonio.Measurements:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    torch.nn.init.zeros_(model[2].weight)
    model[0].weight.data[1, 2] = torch.nan
    return gonio.measure(model)


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_message_is_its_english_text() -> None:
    found = say("{n} of {every}", n=1, every=say("the model"))
    assert found == "1 of the model"
    assert type(local(found)) is str
    assert local(found) == "1 of the model"
    with gonio.language("zh"):
        assert local(found) == "1/整个模型"
        assert f"{found}" == "1 of the model"


def test_values_of_others_are_not_translated() -> None:
    with gonio.language("zh"):
        assert local(say("{path}: {reason}", path="the model", reason=fixed("the model"))) == "the model：整个模型"


def test_fields_of_a_value_are_not_filled() -> None:
    with gonio.language("zh"):
        assert "{done}" in local(say("{what} written to {target}", what=fixed("{done}"), target="{total}"))


def test_parts_are_joined_as_the_language_does() -> None:
    parts = joined(["a", say("the model"), "c"], last=" and ")
    assert parts == "a, the model and c"
    with gonio.language("zh"):
        assert local(parts) == "a、整个模型、c"


def test_without_a_translation_a_message_is_english() -> None:
    template = "nobody translated {this}"
    with gonio.language("zh"):
        assert local(say(template, this=1)) == "nobody translated 1"
        assert local("nor that") == "nor that"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_keeps_its_template(copied) -> None:
    found = copied(say("{n} of {every}", n=1, every=fixed("the model")))
    assert isinstance(found, Message)
    assert found == "1 of the model"
    with gonio.language("zh"):
        assert local(found) == "1/整个模型"


def test_a_sentence_of_another_package_is_recognised() -> None:
    known = ["Invalid value for {name}: {message}", "it must be {least} or more"]
    found = recognised("Invalid value for '--n': it must be 3 or more", known)
    assert found.values["message"].values == {"least": "3"}
    assert recognised("something else", known).template == ""


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(gonio.errors.UnknownNameError, match=r"no language named 'zn'. Did you mean"):
        gonio.language("zn").__enter__()


def test_a_language_ends_with_its_block_and_holds_for_its_thread() -> None:
    seen: list[str] = []

    def fail() -> None:
        with gonio.language("zh"):
            thread = threading.Thread(target=lambda: seen.append(local("the model")))
            thread.start()
            thread.join()
            with gonio.language("en"):
                seen.append(local("the model"))
            seen.append(local("the model"))
            raise RuntimeError("the block fails")

    with pytest.raises(RuntimeError, match="the block fails"):
        fail()
    assert [*seen, local("the model")] == ["the model", "the model", "整个模型", "the model"]


# --- which language ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh"}, "zh"),
        ({"LANG": "zh.UTF-8"}, "zh"),
        ({"LANG": "zha_CN"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_MESSAGES": "de_DE.UTF-8"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_TW"}, "zh"),
        ({"LANG": "zh_CN", "LC_MESSAGES": "zh_CN", "LC_ALL": "C.UTF-8"}, "en"),
        ({"LANG": "zh_CN", "LC_ALL": ""}, "zh"),
    ],
)
def test_the_environment_asks_for_a_language(environment: dict[str, str], expected: str) -> None:
    assert language_of(environment) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["measure", "x", "--lang", "zh"], "zh"),
        (["measure", "--lang=zh", "x"], "zh"),
        (["measure", "--", "--lang", "zh"], "en"),
        (["measure", "--lang", "fr"], "en"),
        (["measure", "--language", "zh"], "en"),
        ([], "en"),
    ],
)
def test_the_command_line_asks_for_a_language(words: list[str], expected: str) -> None:
    assert asked_language(words, {}) == expected


def test_the_command_line_wins() -> None:
    assert asked_language(["explain", "--lang", "en"], {"LANG": "zh_CN.UTF-8"}) == "en"


def test_a_command_speaks_the_language_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert invoke("explain", "G001").stdout.startswith("G001（错误）：值为 NaN 或无穷大")
    assert invoke("explain", "G001", "--lang", "en").stdout.startswith("G001 (error): values that are NaN or infinite")


def test_a_file_sets_the_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gonio.toml").write_text('[measure]\nlang = "zh"\n')
    torch.save({"a.weight": torch.zeros(4, 8)}, "a.pt")
    assert is_chinese(invoke("measure", "a.pt").stdout)
    assert not is_chinese(invoke("measure", "a.pt", "--lang", "en").stdout)
    assert local("the model") == "the model"


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_a_measurement_is_shown_in_chinese_and_exported_in_english() -> None:
    found = damaged()
    english = (str(found), found.to_json(), found.to_csv(), found.to_markdown())
    with gonio.language("zh"):
        shown = str(found)
        assert (found.to_json(), found.to_csv(), found.to_markdown()) == english[1:]
    assert "32 个数中有 1 个为 NaN 或无穷大，第一个在 [1, 2]" in shown
    assert "2/2 层、整个模型：1 个错误、1 个警告、1 个提示。" in shown
    assert "已测量：2/4 个张量。只检查" in shown
    assert str(found) == english[0]
    assert not any(map(is_chinese, english))


def test_the_model_itself_is_named_in_chinese() -> None:
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, 100.0)
    found = next(f for f in gonio.measure(layer, batch=torch.ones(2, 4)).findings if f.code == "G409")
    assert found.found.endswith("the input: the model (× 400)")
    with gonio.language("zh"):
        assert local(found.found) == "输出远大于或远小于输入：整个模型（× 400）"


def test_a_page_is_in_chinese() -> None:
    found = damaged()
    with gonio.language("zh"):
        page, part = found.to_html(), found._repr_html_()
    read = Page(page)
    attributes = dict(read.tags)
    assert attributes["html"]["lang"] == "zh-Hans"
    assert 'lang="zh-Hans"' in part
    headings = [text for tag, text in read.texts if tag == "h2"]
    assert headings == ["诊断", "沿深度", "范数与夹角", "谱", "附注"]
    assert json.loads(attributes["body"]["data-words"] or "")["rows"] == "{} / {} 行"
    assert 'lang="en"' in found.to_html()
    assert not is_chinese(found.to_html())


@pytest.mark.parametrize("code", sorted(gonio.measuring.findings.rules.RULES))
def test_every_rule_is_explained_in_chinese(code: str) -> None:
    english = gonio.measuring.explain(code)
    with gonio.language("zh"):
        chinese = gonio.measuring.explain(code)
    source = english.rpartition("Source: ")[2]
    assert chinese.rpartition("来源：")[2] == source
    assert len(chinese.splitlines()) == len(english.splitlines())
    assert all(is_chinese(line) for line in chinese.splitlines() if line)


@pytest.mark.parametrize("name", ["align", "rank 99%", "dead", "rotation"])
def test_a_column_is_explained_in_chinese(name: str) -> None:
    with gonio.language("zh"):
        assert all(is_chinese(line) for line in gonio.measuring.explain(name).splitlines())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["measure"], "错误：缺少参数 'MODEL|FILE'。"),
        (["measure", "x.pt", "--seeed", "3"], "错误：没有这个选项：--seeed。是否想写 --seed？"),
        (["check", "x.pt", "--html", "x"], "错误：没有这个选项：--html。它是 gonio measure、gonio report 的选项。"),
        (["measure", "x.pt", "--seed", "-3"], "'--seed' 的值无效："),
        (["measure", "x.pt", "--seed"], "需要一个值。"),
        (["explain", "G0001"], "gonio：没有名为 'G0001' 的规则、列或论断。是否想写 G001"),
        (["mesure"], "错误：没有命令 'mesure'。"),
        (["explain", "a", "b"], "错误：多余的参数（b）"),
        (["measure", "x.pt", "--widths", "a"], "gonio：--widths 需要用逗号分隔的整数；实际为："),
        (
            ["measure", "x.pt", "--html", "none/x.html"],
            "gonio：无法写入 'none/x.html'；实际为：没有文件夹 'none'。请先创建它。",
        ),
    ],
)
def test_errors_of_the_command_line_are_in_chinese(
    words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    result = invoke(*words)
    assert result.exit_code == 2
    assert expected in result.stderr


def test_an_exception_stays_english() -> None:
    said = "there is no rule or column named 'G0001'. Did you mean"
    with gonio.language("zh"), pytest.raises(gonio.errors.UnknownNameError, match=said):
        gonio.measuring.explain("G0001")


def test_a_check_is_shown_in_chinese_and_exported_in_english() -> None:
    state = {f"layers.{i}.down.weight": torch.randn(64, 64) for i in range(5)}
    before = gonio.check(state)
    state["layers.1.down.weight"][2, 7] = torch.nan
    state["layers.2.down.weight"][3] = 0
    found = gonio.check(state, against=before.fingerprints)
    english = found.to_json()
    with gonio.language("zh"):
        shown, page = str(found), found._repr_html_()
        assert found.to_json() == english
        assert str(before).startswith("完好：5 个张量都在，每个值都有限。")
    assert "已损坏：1 个错误、3 个警告。" in shown
    one_dead = "64 个卷积核中有 1 个为 0：3"
    for sentence in ("4,096 个数中有 1 个为 NaN 或无穷大，第一个在 [2, 7]", one_dead, "它的值改变了"):
        assert sentence in shown
        assert sentence in page
    assert not is_chinese(str(found))


def test_changes_are_shown_in_chinese_and_exported_in_english() -> None:
    base = {"a.weight": torch.randn(8, 16), "b.weight": torch.randn(8, 16)}
    change = torch.randn(8, 16)
    one, two = ({**base, "a.weight": base["a.weight"] + sign * 3 * change} for sign in (1, -1))
    for found in (gonio.measure(base, one), gonio.measure(base, one, two)):
        english = found.to_json()
        with gonio.language("zh"):
            shown, page = str(found), Page(found.to_html())
            assert found.to_json() == english
        assert "改变的范数是基础模型的" in shown
        headings = [text for tag, text in page.texts if tag in ("h2", "th", "dd", "summary")]
        assert "诊断" in headings
        assert "各列的含义" in headings
        assert not is_chinese(str(found))
    assert "的改变之间的余弦为" in shown


def test_the_page_of_a_training_is_in_chinese() -> None:
    layer = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    tracker = gonio.Tracker(layer, optimizer=optimizer, every=1)
    for _ in range(3):
        layer(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    with gonio.language("zh"):
        page = Page(tracker.to_html())
    assert [text for tag, text in page.texts if tag == "h1"] == ["这次训练如何转动权重"]
    assert not is_chinese(tracker.to_html())


def test_a_comparison_is_shown_in_chinese_and_exported_in_english() -> None:
    found = showing.example()
    exports = (showing.to_json, showing.to_csv, showing.to_markdown, showing.to_latex)
    english = [export(found) for export in exports]
    with gonio.language("zh"):
        page, shown = Page(showing.html(found)), printed(showing.text(found))
        assert [export(found) for export in exports] == english
    assert shown.startswith("decoupled-tanh 有益：+0.90 百分点（95% 区间")
    assert "▲ 有益" in shown
    headings = [text for tag, text in page.texts if tag == "h2"]
    assert headings == ["结论", "证据", "开销", "学习曲线", "各层的夹角与范数", "配方及其改变", "该研究"]
    assert not is_chinese(showing.html(found))


def test_the_page_of_claims_is_in_chinese() -> None:
    claim = load_claim("bn-imagenet")
    found = judge_claims([claim], "no-folder")
    with gonio.language("zh"):
        page = Page(claims_html(found))
    assert [text for tag, text in page.texts if tag == "h2"] == ["论断", "归一化", "本次运行"]
    assert claim.claim_zh in [text for tag, text in page.texts if tag == "h3"]
    assert claim.claim_zh not in claims_html(found)


def test_a_file_that_is_absent_is_reported_in_chinese() -> None:
    result = invoke("check", "absent.pt", "--lang", "zh")
    assert result.exit_code == 3
    assert result.stderr == "gonio：文件 'absent.pt'：无法读取；没有这个文件。请检查路径。\n"
