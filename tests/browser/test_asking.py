"""What a reader can ask of a page: sort, search, filter, open a row, follow a finding, with pointer and keyboard."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from browser.pages import FLAWED
from gonio.measuring.showing.table import PAGE

Visit = Callable[..., Any]
FIRST, SECOND = "#angles table", "#spectra table"


def names(page: Any, table: str = FIRST) -> list[str]:
    return page.locator(f"{table} tbody tr:not(.more):not([hidden]) > th > button").all_text_contents()


def column(page: Any, title: str, table: str = FIRST) -> list[str]:
    at = page.locator(f"{table} thead th").all_inner_texts().index(title)
    return page.locator(f"{table} tbody tr:not(.more):not([hidden]) > :nth-child({at + 1})").all_text_contents()


def numbers(texts: list[str]) -> list[float]:
    return [float(text.replace("−", "-").split("±")[0].split(" ")[0]) for text in texts if text != "–"]


@pytest.fixture
def page(visit: Visit) -> Any:
    return visit("measurements")


def test_a_heading_sorts_both_tables_and_the_first_one_restores_the_order(page: Any) -> None:
    before = names(page)
    head = page.locator(f"{FIRST} thead th", has_text="align")
    head.locator("button").click()
    values = numbers(column(page, page.locator(f"{FIRST} th[aria-sort]").inner_text()))
    assert values == sorted(values, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    assert names(page) == names(page, SECOND) != before
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert names(page) == names(page, SECOND) != before
    page.locator(f"{FIRST} thead button").first.click()
    assert names(page) == names(page, SECOND) == before


def test_search_and_filters_leave_the_rows_that_were_asked_for(page: Any) -> None:
    everything, search = names(page), page.locator("#angles").get_by_role("searchbox")
    search.fill("head")
    assert names(page) == names(page, SECOND) == ["head"]
    assert page.locator("#angles [role=status]").inner_text() == f"1 of {len(everything)} rows"
    search.fill("G203")
    assert names(page) == ["body.2"]
    search.fill("")
    page.get_by_role("button", name="warn").click()
    assert set(names(page)) == set(FLAWED)
    page.get_by_role("button", name="warn").click()
    page.get_by_role("combobox").select_option("Linear")
    assert names(page) == ["head"]
    page.get_by_role("combobox").select_option("all types")
    assert names(page) == everything


def test_the_controls_of_a_chinese_page_are_in_chinese(visit: Visit) -> None:
    page = visit("chinese")
    assert page.locator("html").get_attribute("lang") == "zh-Hans"
    search = page.get_by_role("searchbox", name="搜索: 范数与夹角")
    assert search.get_attribute("placeholder") == "名字、类型或编号"
    search.fill("head")
    assert page.locator("#angles [role=status]").inner_text() == "1 / 10 行"
    search.fill("")
    page.get_by_role("button", name="警告").click()
    assert set(names(page)) == set(FLAWED)
    page.get_by_role("combobox", name="层的类型").select_option("全部类型")
    page.locator("#angles tr.open:not([hidden]) button").first.click()
    assert "通常" in page.locator(".detail dd.range").first.inner_text()
    assert page.locator(".detail p.note").inner_text().startswith("通常范围")
    page.keyboard.press("/")
    assert search.evaluate("(box) => box === document.activeElement")


def test_a_row_opens_with_all_that_the_page_has_on_it(page: Any) -> None:
    page.locator(f"{FIRST} tbody tr", has_text="body.2").locator("button").click()
    detail = page.locator(".detail")
    assert detail.locator("figcaption").count() == 3  # norms, angles, spectrum
    heads = page.locator(f"{FIRST} thead th, {SECOND} thead th").count() - 2
    assert detail.locator("dt").count() + detail.locator("figure").count() == heads
    assert "Initialise one of each pair anew" in detail.inner_text()
    held = detail.locator("dd.range")
    assert held.count() >= 5
    assert set(held.evaluate_all("(all) => all.map((one) => one.classList[1])")) <= {"low", "usual", "high"}
    assert all(re.search(r"usual,? .+ to .+", text) for text in held.all_inner_texts())
    assert detail.locator("p.note").inner_text().startswith("Usual: from the 5th to the 95th percentile of")
    page.locator(f"{FIRST} tbody tr", has_text="head").locator("button").click()
    assert detail.count() == 1
    assert "filters 3 and 4" not in detail.inner_text()


def test_a_finding_links_to_its_row_and_back(page: Any) -> None:
    page.locator("#angles").get_by_role("searchbox").fill("head")  # the row is hidden
    page.locator("#findings a", has_text="body.4").first.click()
    row = page.locator(f"{FIRST} tr", has=page.locator("button", has_text="body.4"))
    assert row.is_visible()
    assert row.locator("button").get_attribute("aria-expanded") == "true"
    assert page.evaluate("document.activeElement.textContent") == "body.4"
    row.locator("a.badge", has_text=FLAWED["body.4"]).click()
    finding = page.locator("#findings li:target")
    assert finding.inner_text().startswith("body.4: 1 of 16 filters")
    assert finding.is_visible()


def test_the_keyboard_reaches_everything(page: Any) -> None:
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.type("body.3")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == "body.3"
    page.locator("#angles").get_by_role("searchbox").fill("head")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "head"
    assert page.locator(".detail").count() == 1
    page.keyboard.press("/")
    page.locator("#angles").get_by_role("searchbox").fill("")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.tagName") == "BODY"
    page.locator(f"{FIRST} tbody button").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.textContent") == names(page)[1]
    page.keyboard.press("Enter")
    assert page.locator(".detail").count() == 1
    page.keyboard.press("Escape")
    assert page.locator(".detail").count() == 0
    page.locator(f"{FIRST} thead button").nth(3).focus()
    assert page.locator("#tip").inner_text() == "length of a filter"


def test_the_chart_over_depth_reads_out_a_layer_and_opens_it(page: Any) -> None:
    chart = page.get_by_role("slider")
    chart.focus()
    page.keyboard.press("End")
    assert page.locator(".readout strong").inner_text() == names(page)[-1] == "head"
    page.keyboard.press("ArrowLeft")
    assert chart.get_attribute("aria-valuenow") == str(len(names(page)) - 1)
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == names(page)[-2]
    page.locator(".depth .plot").first.scroll_into_view_if_needed()
    box = page.locator(".depth .plot").first.bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 4)
    assert page.locator(".readout strong").inner_text() == "stem"


def test_models_side_by_side_have_their_figures_in_one_row(page: Any) -> None:
    table = "#beside table"
    heads = page.locator(f"{table} thead th").all_inner_texts()
    assert [head for head in heads if head.startswith("align")] == ["align 1", "align 2"]
    first, second = numbers(column(page, "norm 1", table)), numbers(column(page, "norm 2", table))
    assert all(b > a for a, b in zip(first, second, strict=True))  # noise was added
    assert column(page, "findings 1", table).count("G102") == 1
    assert "G102" not in column(page, "findings 2", table)
    page.locator(f"{table} thead th", has_text="norm 2").locator("button").click()
    values = numbers(column(page, page.locator(f"{table} th[aria-sort]").inner_text(), table))
    assert values == sorted(values, reverse=True)


def test_differences_come_largest_first_and_the_chart_keeps_the_order_of_the_model(visit: Visit) -> None:
    page = visit("differences")
    table = "#tensors table"
    values = numbers(column(page, "change", table))
    assert values == sorted(values, reverse=True)
    page.locator(f"{table} thead button").first.click()
    assert names(page, table)[0] == "stem"
    chart = page.get_by_role("slider")
    chart.focus()
    assert page.locator(".readout strong").inner_text() == "stem"


def test_a_curve_has_its_values_under_the_pointer(visit: Visit) -> None:
    page = visit("study")
    chart = page.locator("svg[data-curve]").first
    chart.scroll_into_view_if_needed()
    chart.hover(position={"x": 160, "y": 60})
    said = page.locator("figure .tip:visible").inner_text()
    assert re.fullmatch(r"epoch 1\d · baseline 9\d\.\d+ · orthogonal-init 9\d\.\d+", said)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["sort", "search"])
def test_the_longest_page_stays_small_and_each_row_is_moved_once(action: str, visit: Visit, files: Any) -> None:
    assert files("large").stat().st_size <= 2_000_000
    page = visit("large")
    rows = page.locator(f"{FIRST} tbody tr").count()
    assert rows == PAGE.longest
    page.evaluate(
        """() => {
            window.touched = 0;
            const count = (records) => { for (const r of records) window.touched += r.addedNodes.length || 1; };
            const watch = {childList: true, attributes: true, subtree: true};
            for (const body of document.querySelectorAll('tbody')) new MutationObserver(count).observe(body, watch);
        }"""
    )
    if action == "sort":
        page.locator(f"{FIRST} thead th", has_text="align").locator("button").click()
        values = numbers(column(page, page.locator(f"{FIRST} th[aria-sort]").inner_text()))
        assert values == sorted(values, reverse=True)
    else:
        page.get_by_role("searchbox").fill("blocks.17.")
        assert len(names(page)) == 4
    assert 0 < page.evaluate("window.touched") <= 4 * rows + 8  # two tables, each row taken out and put in
