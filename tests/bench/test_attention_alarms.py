"""The rates of false alarms of the rules on attention: what is committed, what pages say of it, and one network."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from benchmarks import attention_alarms

from gonio.measuring.findings.rules import HEAD_RULES, measured_rates

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "training-dynamics.md"


def test_the_rates_are_those_of_the_package_and_of_the_page() -> None:
    found = json.loads(attention_alarms.RESULT.read_text(encoding="utf-8"))
    trained, drawn, planted = found["trained"], found["random"], found["planted in trained"]
    assert set(HEAD_RULES) == set(attention_alarms.CODES) == set(trained["findings"])
    for code, seen in trained["findings"].items():
        rate = measured_rates()["cases"][code]
        assert (rate["alarms"], rate["cases"], rate["upper"]) == (seen["models"], trained["models"], seen["upper"])
        assert seen["upper"] < 0.025
        assert drawn["findings"][code]["models"] == 0
    assert trained["models"] >= 150
    assert planted["queries × 100"]["found"] == planted["queries × 100"]["attentions"]
    said = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"In {trained['models']} healthy small transformers" in said
    assert f"in {drawn['models']} at their initialisation neither" in said
    assert f"Of {planted['queries × 100']['attentions']} attentions in the trained ones" in said
    assert f"by 10 only {planted['queries × 10']['found']}" in said
    assert [trained["findings"][code]["models"] for code in attention_alarms.CODES] == [1, 0]


def test_enlarged_queries_are_found_in_a_network_of_each_kind() -> None:
    with torch.no_grad():
        for number in (0, 1):
            seen = attention_alarms.seen(number, train=False)
            assert seen is not None
            assert seen["findings"] == []
            assert max(seen["logits"]) < 10
    kind, model, _ = attention_alarms.untrained(0)
    batch = attention_alarms.batch_of(kind)
    found = attention_alarms.anatomy(model.eval(), example=batch[:2])
    (block, *_) = found.attention
    with torch.no_grad():
        for part in {part for head in block.query for part in head}:
            model.get_parameter(part.tensor)[part.indices] *= 1000
    codes = {code for code, path in attention_alarms.alarms(model, batch, found)[0] if path == block.path}
    assert "G413" in codes
