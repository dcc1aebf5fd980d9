"""The page: complete, self-contained, safe with foreign text, the same bytes for the same results."""

from __future__ import annotations

import itertools
import os
import re
import stat
import sys

import pytest

from gonio.lab.showing import html, write_html
from gonio.recipes import BASELINE
from html_reader import Page
from lab.showing.samples import effect, geometry, plan, results, run

PAYLOADS = [
    "<script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "</svg><script>alert(1)</script>",
    "</pre></details><img src=x onerror=alert(1)>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg/onload=alert(1)//",
    "<iframe src=javascript:alert(1)>",
    "<body onload=alert(1)>",
    "<a href=javascript:alert(1)>x</a>",
    "javascript:alert(1)",
    "data:text/html,<script>alert(1)</script>",
    '"><script>alert(1)</script>',
    "'><script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "' onfocus='alert(1)' autofocus='",
    "` onmouseover=`alert(1)`",
    "{{ 7 * 7 }}",
    "{% for x in ().__class__.__mro__ %}{{ x }}{% endfor %}",
    "${7*7}",
    "$\\frac{1}{0",
    "<!--><script>alert(1)</script>-->",
    "<![CDATA[<script>alert(1)</script>]]>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "<scr\x00ipt>alert(1)</scr\x00ipt>",
    "\u202e<script>alert(1)</script>\u2066",
    "<style>@import 'http://evil.example/x.css';</style>",
    "fill: #010101; </text><use href='http://evil.example/#x'/>",
    '<meta http-equiv="refresh" content="0;url=http://evil.example">',
    "<base href=http://evil.example/>",
    "\ud800<script>alert(1)</script>",
]
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "article", "nav"),
    *("h1", "h2", "h3", "p", "ul", "li", "dl", "dt", "dd", "div", "span", "strong", "small", "sup", "a", "pre"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td", "details", "summary", "figure", "figcaption"),
    *("svg", "desc", "path", "text", "rect", "line"),
    "script",  # only the page's own, see Page.may_run
}


@pytest.fixture(scope="module")
def page() -> str:
    return html(results())


def test_the_verdict_comes_first_and_everything_else_follows(page: str) -> None:
    read = Page(page)
    assert [a["id"] for tag, a in read.tags if tag == "section"] == [
        "verdict", "effects", "costs", "curves", "layers", "recipes", "study",
    ]  # fmt: skip
    heading = next(text for tag, text in read.texts if tag == "h1")
    assert heading == "decoupled-tanh helps: +0.60 points (95 % interval +0.40 to +0.80)."
    for said in ("+0.10", "×1.08", "0.031", "init orthogonal_", "use: orthogonal_", "torch 2.13.0"):
        assert said in read.text
    assert "gonio compare --seeds 8 -o study" in read.text
    assert plan(("orthogonal-init", "decoupled-tanh")).hash in read.text


def test_the_page_loads_nothing_and_runs_only_its_own_script(page: str) -> None:
    read = Page(page)
    assert read.names() <= TAGS
    assert not {a for a in read.attributes() if a.startswith("on") or a in ("src", "srcset", "action")}
    assert all(value.startswith("#") for value in read.values("href"))
    assert "http:" not in page.replace("http-equiv", "")
    assert "https:" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert len(read.may_run()) == 1
    assert any(value.startswith("default-src 'none'; script-src 'sha256-") for value in read.values("content"))


def test_the_same_results_give_the_same_bytes(page: str) -> None:
    assert html(results()) == page


def test_ids_are_unique_and_every_reference_has_its_target(page: str) -> None:
    read = Page(page)
    ids = read.values("id")
    assert len(ids) == len(set(ids))
    targets = {value[1:] for value in read.values("href")} | set(re.findall(r"url\(#([^)]+)\)", page))
    assert targets <= set(ids)
    assert set(read.values("aria-labelledby")) <= set(ids)


def test_the_page_can_be_used_without_seeing_it(page: str) -> None:
    read = Page(page)
    for tag, attributes in read.tags:
        if tag == "svg":
            assert attributes.get("aria-hidden") == "true" or attributes.get("aria-label"), attributes
        if tag == "th":
            assert attributes.get("scope") in ("row", "col")
    levels = [int(tag[1]) for tag, _ in read.tags if re.fullmatch(r"h[1-6]", tag)]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    assert ("html", {"lang": "en"}) in read.tags


def test_colours_keep_the_contrast_that_text_and_lines_need(page: str) -> None:
    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    blocks = re.findall(r"\.gonio \{\n(.*?)\}", page, flags=re.DOTALL)[:2]
    assert len(blocks) == 2  # light, dark
    for block in blocks:
        color = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        pairs = [("ink", "paper"), ("muted", "paper"), ("muted", "card"), ("good", "paper"), ("good", "card")]
        pairs += [(tone, f"{tone}-tint") for tone in ("good", "bad", "even")]
        pairs += [("ink", "bad-tint"), ("good", "bad-tint"), ("ink", "warn-tint"), ("warn", "warn-tint")]
        assert {p: contrast(color[p[0]], color[p[1]]) for p in pairs if contrast(color[p[0]], color[p[1]]) < 4.5} == {}
        lines = ["base", *(f"c{i}" for i in range(1, 8))]
        assert {c: contrast(color[c], color["paper"]) for c in lines if contrast(color[c], color["paper"]) < 3} == {}


def test_broken_runs_are_stated_prominently() -> None:
    broken = run("decoupled-tanh", 1, status="diverged"), run("decoupled-tanh", 2, status="failed")
    fine = tuple(run(r, 0) for r in (BASELINE, "orthogonal-init", "decoupled-tanh"))
    read = Page(html(results(runs=fine + broken, missing=3)))
    alert = " ".join(read.text[: read.text.index("Verdict")].split())
    for said in (
        "1 of 8 runs diverged and counted as the worst score; 1 of 8 runs failed and left no score; 3 of 8 runs have",
        "decoupled-tanh, seed 1: diverged: RuntimeError: broke at step 1",
        "second line",
    ):
        assert said in alert


@pytest.mark.parametrize("start", range(0, len(PAYLOADS), 8))
def test_escaping_is_text_and_never_markup(start: int) -> None:
    payloads = tuple(PAYLOADS[start : start + 8])
    broken = tuple(run(p, 0, epochs=3, plan=p, status="failed", error=p) for p in payloads)
    whole = " ".join(payloads)
    made = results(
        payloads,
        effects=tuple(effect(p, verdict=p, reason=p) for p in payloads),
        runs=(run(BASELINE, 0, epochs=3, geometry=geometry(len(payloads), paths=payloads)), *broken),
        notes=payloads,
        command=whole,
        versions=dict(zip(payloads, payloads, strict=True)),
        plan_changes={
            "task": whole,
            "model": whole,
            "metric": whole,
            "unit": whole,
            "code": dict(zip(payloads, payloads, strict=True)),
            "history": tuple({p: p} for p in payloads),
        },
    )
    read = Page(html(made))
    assert read.names() <= TAGS
    assert len(read.may_run()) == 1
    assert all(value.startswith("#") for value in read.values("href"))
    assert not {a for a in read.attributes() if a.startswith("on") or a in ("src", "autofocus")}
    assert [value.lower() for value in read.values("http-equiv")] == ["content-security-policy"]
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", read.text)
    assert "{{ 7 * 7 }}" in read.text or "{{ 7 * 7 }}" not in payloads


def test_home_directories_and_credentials_do_not_leave_the_machine() -> None:
    secret = "fatal: https://me:token@example.org/repo in /home/alice/project"
    broken = run("decoupled-tanh", 0, status="failed", error=secret)
    text = html(results(runs=(run(BASELINE, 0), broken), command="gonio compare -o /Users/bob/study"))
    assert not [word for word in ("token", "alice", "bob") if word in text]
    assert "~/project" in text


def test_six_recipes_of_eight_seeds_stay_below_a_megabyte() -> None:
    recipes = tuple(f"recipe-{i}" for i in range(6))
    text = html(results(recipes, layers=54))
    assert len(text.encode()) < 1_000_000
    assert "16 of 54 layers are shown" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"effects": (), "runs": (), "baseline_mean": None, "baseline_sd": None, "missing": 24},
        {"runs": (run(BASELINE, 0, status="failed"),), "effects": (effect("decoupled-tanh", mean=None),)},
        {"effects": (effect("decoupled-tanh", step_time=None, memory=None, p_holm=None),)},
        {"runs": (run(BASELINE, 0, curve={}, geometry={}, plan=""),)},
        {"effects": (effect("decoupled-tanh", differences=(-1e9, 0.5, 1e9)),)},
        {"runs": tuple(run("decoupled-tanh", s, curve={"train_loss": [None], "val_score": [None]}) for s in (0, 1))},
    ],
)
def test_incomplete_results_have_a_page_too(changes: dict[str, object]) -> None:
    text = Page(html(results(("decoupled-tanh",), **changes))).text
    assert "decoupled-tanh" in text
    assert "nan" not in text.lower().split()


def test_less_is_better_turns_the_words() -> None:
    text = Page(html(results(plan_changes={"direction": "min", "unit": "nats", "metric": "loss"}))).text
    assert all(said in text for said in ("less is better.", "← better", "+0.60 nats"))


def test_writing_replaces_the_file_whole(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    assert write_html(results(), target) == target
    assert target.read_text(encoding="utf-8") == html(results())
    assert list(tmp_path.iterdir()) == [target]
    mask = os.umask(0o022)
    os.umask(mask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~mask

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", refuse)
    target.write_text("old")
    with pytest.raises(OSError, match="disk full"):
        write_html(results(), target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_page_needs_no_further_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "scipy", "sklearn", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
    assert html(results()).startswith("<!DOCTYPE html>")
