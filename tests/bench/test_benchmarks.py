"""A tiny benchmark from end to end: rows, JSON, tables, and that all candidates compute the same."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from benchmarks import other_ways
from benchmarks.__main__ import main, parse, run, topics, without_compiled
from benchmarks.harness import Settings
from benchmarks.machine import restart_with
from benchmarks.results import Report, merged, path_of, read, write
from benchmarks.tables import BLOCK, MISSING, ROOT, filled, markdown
from benchmarks.tables import main as tables
from benchmarks.whole_steps import networks, step_of
from torch import Tensor, nn

TINY = Settings(rounds=2, sample_seconds=1e-4, retries=0)
AGREEMENT = 1e-3  # float32 sums in another order; a peer with another formula is off by far more


LONG = ("training_dynamics", "whole_steps", "other_ways")  # half a minute each: whole networks with every method
SAME_GRADIENTS = {  # the others have other constants, draw their own vectors, or start from another raw weight
    "orthogonality, add_grads_": ("usual", "whole Gram matrices", "a batch per shape"),
    "spectral norm": ("torch", "plain"),
    "scale shift, add_grads_": ("usual", "plain", "one by one", "lists of tensors"),
    "switchable norm": ("usual", "plain", "autograd of var_mean"),
    "weight standardisation": ("usual", "plain", "as a batch norm"),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(topic, marks=pytest.mark.slow) if topic in LONG else topic for topic in topics()],
)
def report(request: pytest.FixtureRequest) -> Report:
    topic = importlib.import_module(f"benchmarks.{request.param}")
    return run(topic, TINY, quick=True, threads=1)


def test_candidates_compute_the_same(report: Report) -> None:
    for row in report.rows:
        for measured in row.candidates:
            if measured.deviation is None:  # random results, steps with and without a penalty, other figures
                assert report.topic in ("measuring", "orthogonal_init", "start_up", "large_files", "files", *LONG)
                continue
            if measured.name.startswith(
                "FAISS LSH"
            ):  # present where FAISS is: an approximate search, whose recall is shown
                continue
            assert measured.deviation < AGREEMENT, f"{row.case} {row.mode}: {measured.name} {measured.deviation}"


@pytest.mark.parametrize(("method", "way"), [(method, way) for method, ways in SAME_GRADIENTS.items() for way in ways])
def test_other_ways_have_the_gradients_of_ours(method: str, way: str) -> None:
    digits = next(network for network in networks(quick=True) if network.name == "digits network")

    def gradients(make: other_ways.Way) -> list[Tensor]:
        models: list[nn.Module] = []
        make(replace(digits, build=lambda: models.append(digits.build()) or models[-1]))()
        return [p.grad for p in models[0].parameters() if p.dim() == 4]

    found, expected = (
        gradients(make)
        for make in (other_ways.WAYS["digits network", method][way], lambda n: step_of(n, other_ways.OURS[method]))
    )
    for ours, theirs in zip(expected, found, strict=True):
        assert float((ours - theirs).norm() / ours.norm()) < 1e-5


def test_a_report_survives_its_file(report: Report, tmp_path: Path) -> None:
    path = write(report, folder=tmp_path)
    assert path == tmp_path / "local" / f"{report.topic}.json"
    assert read(path) == report
    data = json.loads(path.read_text(encoding="utf-8"))
    assert {"topic", "machine", "versions", "allocator", "threads", "rows"} <= set(data)
    assert {"case", "mode", "floor", "candidates", "rounds", "dropped", "disturbed"} <= set(data["rows"][0])
    assert {"name", "wall", "cpu", "milliseconds", "peak_mib"} <= set(data["rows"][0]["candidates"][0])


def test_rows_measured_one_after_another_make_one_report(report: Report) -> None:
    first, *others = report.rows
    order = [row.key for row in report.rows]
    parts = [replace(report, rows=(row,)) for row in (*reversed(others), first)]
    whole = parts[0]
    for part in parts[1:]:
        whole = merged(part, whole, order)
    assert whole == report
    again = replace(first, rounds=first.rounds + 1)
    assert merged(replace(report, rows=(again,)), report, order).rows == (again, *others)
    assert merged(report, report, order[1:]).rows == tuple(others)  # a row that the topic no longer has


def test_figures_of_two_machines_share_no_table(report: Report) -> None:
    other = replace(report, threads=report.threads + 1, versions={**report.versions, "torch": "0.1"})
    with pytest.raises(ValueError, match="measured before with other threads, versions; measure all rows anew"):
        merged(report, other, ())


def test_a_malformed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"topic": "x", "rows": [{}]}', encoding="utf-8")
    with pytest.raises(ValueError, match="validation error"):
        read(path)


def test_the_full_rows_are_well_formed(report: Report) -> None:
    topic = importlib.import_module(f"benchmarks.{report.topic}")
    rows = list(topic.rows(quick=False))
    keys = [(row.table, row.case, row.mode) for row in rows]
    assert len(set(keys)) == len(keys), "two rows under one name"
    for row in rows:
        names = [candidate.name for candidate in row.candidates]
        assert len(set(names)) == len(names)
        assert any(name.startswith("gonio") for name in names), f"{row.case}: nothing of this project"
    assert all(without_compiled(row).candidates for row in topic.rows(quick=True)), "a quick run has a row of nothing"


def test_tables(report: Report, tmp_path: Path) -> None:
    path = path_of(report.topic, folder=tmp_path)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(write(report, folder=tmp_path / "quick").read_bytes())
    page = f"Before.\n<!-- benchmark {report.topic} -->\nstale figures\n<!-- /benchmark -->\nAfter.\n"
    first = filled(page, tmp_path)
    assert "stale figures" not in first
    assert "gonio" in first
    assert report.rows[0].case in first
    assert first.startswith("Before.\n<!-- benchmark")
    assert first.endswith("<!-- /benchmark -->\nAfter.\n")
    assert filled(first, tmp_path) == first
    table = report.rows[0].table
    row = report.rows[0]
    memory = markdown(report, table=table, what="memory")
    assert f"{row.floor.peak_mib:.1f}" in memory
    if row.floor.peak_mib:
        assert f"(×{row.candidates[0].peak_mib / row.floor.peak_mib:.2f})" in memory
    if report.topic == "whole_steps":
        beside = next(m.beside for m in row.candidates if m.name == "usual")
        assert f"| {beside.median:.2f} (" in markdown(report, table=table, what="time")
    assert markdown(report, table="no such table", what="time") == MISSING
    errors = markdown(report, table=table, what="deviation")
    shown = report.rows[0].candidates[0].deviation
    assert ("0.0e+00" if shown is not None else "–") in errors
    assert "floor ms" not in errors


def test_a_page_may_ask_for_what_is_not_measured_yet(tmp_path: Path) -> None:
    page = "<!-- benchmark nothing -->\nNot measured.\n<!-- /benchmark -->\n"
    assert filled(page, tmp_path) == page


def test_the_pages_show_the_results() -> None:
    assert tables(["--check"]) == 0, "run `python -m benchmarks.tables`"


def test_every_topic_has_a_table() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    asked = {match["ask"].split()[0] for match in BLOCK.finditer(page)}
    assert asked == {*topics(), "study", "orthogonal_conv"}  # whose figures are no ratios to a floor


def test_an_unknown_topic_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["no-such-topic"])
    assert "there are conv_norm, conv_orthogonality" in capsys.readouterr().err


def test_the_process_starts_again_under_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], str]] = []
    monkeypatch.setattr("os.execve", lambda file, command, env: started.append((command[1:], env["SETTING_"])))
    monkeypatch.setenv("SETTING_", "old")
    restart_with({"SETTING_": "new"}, "benchmarks", ["--quick"])
    assert started == [(["-m", "benchmarks", "--quick"], "new")]
    restart_with({"SETTING_": "old"}, "benchmarks", ["--quick"])
    assert len(started) == 1


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.__main__.restart_with", lambda *_: None)
    monkeypatch.setattr("benchmarks.__main__.write", lambda report: write(report, folder=tmp_path))
    assert main(["decoupled_linear", "--quick", "--threads", "1"]) == 0
    assert "decoupled_linear.json" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_keeps_the_rows_that_were_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.__main__.restart_with", lambda *_: None)
    monkeypatch.setattr("benchmarks.__main__.write", lambda report: write(report, folder=tmp_path))
    monkeypatch.setattr("benchmarks.__main__.path_of", partial(path_of, folder=tmp_path))
    for table in ("layers", "whole"):
        assert main(["orthogonal_init", "--quick", "--threads", "1", "--rows", f"^{table} "]) == 0
    found = read(path_of("orthogonal_init", quick=True, folder=tmp_path))
    topic = importlib.import_module("benchmarks.orthogonal_init")
    assert [row.key for row in found.rows] == [(row.table, row.case, row.mode) for row in topic.rows(quick=True)]
    with pytest.raises(ValueError, match="other threads"):
        main(["orthogonal_init", "--quick", "--threads", "2", "--rows", "whole"])


def test_the_planted_damages_are_found_and_healthy_networks_left_alone() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "planted_damage.json").read_text(encoding="utf-8"))
    seen = [record for record in found["damages"] if record["damage"] not in found["hidden"]]
    assert len({(record["damage"], record["architecture"], record["place"]) for record in seen}) >= 40
    assert sum(record["found by"] is not None for record in seen) >= 0.95 * len(seen)
    assert found["healthy"]["networks"] >= 100
    assert len(found["healthy"]["fired"]) <= 0.01 * found["healthy"]["networks"]
