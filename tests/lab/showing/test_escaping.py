"""Foreign text in every sink: page, spreadsheet, markdown, terminal."""

from __future__ import annotations

import csv
import io
import json
import unicodedata

import pytest

from gonio.escaping import csv_cell, markdown_cell, plain, redact, shorten
from gonio.lab.showing import text, to_csv, to_json, to_markdown
from lab.showing.samples import effect, printed, results, run

FORMULAS = [
    *("=1+1", "+1+1", "-1+1", "@SUM(A1)", "=HYPERLINK('http://evil.example','x')", "=cmd|' /C calc'!A0"),
    *("\t=1+1", "\r=1+1", "\n=1+1", "  =1+1", "＝1+1", "－1", "-", "+", "-nan", "\x00=1+1", "\u202e=1+1"),
]


def test_plain_keeps_text_and_drops_what_is_not_shown() -> None:
    everything = "".join(map(chr, range(0x3000))) + "\ue000\ufeff\U000e0041\ud800"
    kept = plain(everything)
    assert not {c for c in kept if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"}} - {"\n", "\t"}
    assert plain("Orthogonalität 直交 ×\n\t") == "Orthogonalität 直交 ×\n\t"
    assert plain("x" * 30, longest=10) == "xxxxxxxxxx … (20 more characters)"


@pytest.mark.parametrize("payload", FORMULAS)
def test_no_cell_starts_like_a_formula(payload: str) -> None:
    cell = csv_cell(payload)
    assert cell.startswith("'")
    assert cell[1:] == plain(payload)


@pytest.mark.parametrize("number", [-1.5, 1e-9, -1e22, 0, 3])
def test_numbers_stay_numbers(number: float) -> None:
    assert float(csv_cell(number)) == number


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a|b", r"a\|b"),
        ("**bold** _em_ `code`", r"\*\*bold\*\* \_em\_ \`code\`"),
        ("[x](javascript:alert(1))", r"\[x\](javascript:alert(1))"),
        ("![x](http://e)", r"\!\[x\](http://e)"),
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)&gt;"),
        ("a\nb | c", r"a b \| c"),
        ("\\", r"\\"),
        ("@everyone #1 $x$", r"\@everyone \#1 \$x\$"),
        ("&lt;script&gt;", "&amp;lt;script&amp;gt;"),
    ],
)
def test_no_markdown_cell_is_markup(text: str, said: str) -> None:
    assert markdown_cell(text) == said


def test_redact_leaves_ordinary_text_alone() -> None:
    text = "loss was nan at a/home/b, see https://example.org/x@y"
    assert redact(text) == text
    assert redact("C:\\Users\\me\\x and /home/me/x and /root") == "~\\x and ~/x and /root"


def test_shorten_keeps_both_ends_and_its_length() -> None:
    for longest in (3, 10, 28):
        assert len(shorten("a" * 50 + "b" * 50, longest=longest)) == longest
    assert shorten("two\nlines") == "two lines"


def test_the_csv_reads_back_with_the_names_and_numbers_in_place() -> None:
    made = results(("=1+1", 'a"b,c'))
    rows = list(csv.DictReader(io.StringIO(to_csv(made))))
    assert [row["recipe"] for row in rows] == ["'=1+1", 'a"b,c']
    assert float(rows[1]["effect"]) == made.effects[1].mean
    assert float(rows[1]["low"]) == made.effects[1].low
    assert rows[0]["step_time"] == "1.084"


def test_the_json_is_strict_and_complete() -> None:
    broken = run("decoupled-tanh", 0, status="failed", error="in /home/alice/x\x1b[31m")
    made = results(("decoupled-tanh",), effects=(effect("decoupled-tanh", mde=float("inf")),), runs=(broken,))
    read = json.loads(to_json(made))
    assert read["schema"] == "gonio.results/1"
    assert read["effects"][0]["mean"] == made.effects[0].mean
    assert read["effects"][0]["mde"] is None
    assert read["runs"][0]["error"] == "in ~/x[31m"
    assert read["plan"]["hash"] == made.plan.hash


def test_the_markdown_table_has_the_same_number_of_cells_in_every_line() -> None:
    made = to_markdown(results(("a|b", "`c`", "<d>")))
    lines = [line.replace(r"\|", "") for line in made.splitlines() if line.startswith("|")]
    assert len(lines) == 10  # two tables of seven columns
    assert {line.count("|") for line in lines} == {8}


@pytest.mark.parametrize("width", [30, 60, 80, 91, 92, 100, 160])
def test_the_terminal_table_keeps_to_its_width_and_shows_every_name_whole(width: int) -> None:
    names = ("orthogonal-init", "[bold]x[/bold]", "\x1b[31mred\x1b[0m")
    shown = printed(text(results(names, missing=1)), width=width)
    assert max(map(len, shown.splitlines())) <= width
    for said in ("orthogonal-init", "[bold]x[/bold]", "[31mred[0m", "undecided", "▲ helps", "▼ hurts"):
        assert said in " ".join(shown.split())
    assert "\x1b[31m" not in shown
