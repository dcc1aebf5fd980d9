"""Law: every method works in every setting of real training, or is refused in one sentence (`docs/matrix.md`)."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import foreign
from laws import matrix
from laws.settings import LOCAL, SUBJECTS, Subject, assert_same, assert_trained, moved, train
from laws.settings_processes import DISTRIBUTED, REFUSED, Result, everything
from ranks import spawned

DOCS = Path(__file__).parents[2] / "docs"
OPTIONAL = {"Lightning": "lightning", "HF": "transformers", "Accelerate": "accelerate", "ONNX": "onnxruntime"}
LINEAR = ("Sphere", "WeightNorm", "SpectralNorm", "Orthogonal", "OrthogonalConv", "WeightStandardization")
CONVOLUTIONS = (
    "DecoupledConv",
    "DecoupledConvTranspose",
    "SwitchableNorm",
    "SpectralNorm of conv",
    "ConvOrthogonality",
)
REFUSALS: dict[tuple[str, str], str] = {
    **{("TP", name): "it is parametrized, and tensor parallelism splits Parameters" for name in LINEAR},
    **{("TP", name): "ColwiseParallel currently only support nn.Linear" for name in CONVOLUTIONS},
    ("TP", "DecoupledLinear"): "whose mean norms need no joining. Construct it with synchronize=False",
    **{("FSDP1", name): "FSDP 1. cannot be added. Fold it first" for name in (*LINEAR, "SpectralNorm of conv")},
    **{
        ("FSDP1", s.name): "Penalty: cannot be applied to the model; its parameters are slices of one flat tensor"
        for s in SUBJECTS
        if s.regularizer is not None
    },
}


def over(settings: dict[str, Any]) -> pytest.MarkDecorator:
    """Each setting with each subject, as a cell of the matrix."""
    cells = [
        pytest.param(setting, subject, id=f"{setting}-{subject.name}", marks=pytest.mark.matrix(setting))
        for setting in settings
        for subject in SUBJECTS
    ]
    return pytest.mark.parametrize(("setting", "subject"), cells)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Result]]:
    return spawned(everything, tmp_path_factory.mktemp("settings"))


@pytest.fixture
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' own remarks
        foreign.torchvision()
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_quiet")
@over(LOCAL)
def test_in_one_process(setting: str, subject: Subject) -> None:
    if setting in OPTIONAL:
        pytest.importorskip(OPTIONAL[setting], reason=f"{OPTIONAL[setting]} is not installed")
    check_in_setting = LOCAL[setting]
    check_in_setting(subject)


@pytest.mark.slow
@over(DISTRIBUTED)
def test_in_several_processes(
    setting: str, subject: Subject, ranks: list[dict[str, Result]], record_property: Callable[[str, str], None]
) -> None:
    check(ranks, setting, subject, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("subject", [s for s in SUBJECTS if ("FSDP1", s.name) in REFUSALS], ids=lambda s: s.name)
def test_flat_shards_are_refused(subject: Subject, ranks: list[dict[str, Result]]) -> None:
    check(ranks, "FSDP1", subject, lambda *_: None)


def check(
    ranks: list[dict[str, Result]], setting: str, subject: Subject, record_property: Callable[[str, str], None]
) -> None:
    expected = REFUSALS.get((setting, subject.name))
    for rank in ranks:
        found = rank[f"{setting} {subject.name}"]
        if expected is None:
            assert not isinstance(found, str), found
            assert_trained(found, subject)
        else:
            assert isinstance(found, str), f"{subject.name} is no longer refused under {setting}"
            kind, sentence = found.split(": ", 1)
            assert kind == REFUSED, found
            assert re.search(expected, sentence), sentence
            record_property("refused", sentence)


# --- negative controls, and the page ----------------------------------------------------------------


def test_the_law_refuses_a_training_without_its_penalty() -> None:
    subject = next(s for s in SUBJECTS if s.name == "Orthogonality")
    without = Subject(name=subject.name, make=subject.make, shape=subject.shape)
    with pytest.raises(AssertionError, match="tensor 0 of the state differs"):
        assert_trained(train(without), subject)


def test_the_laws_refuse_another_model() -> None:
    with pytest.raises(AssertionError, match="of the state differs"):
        assert_trained(train(SUBJECTS[0], wrap=lambda model: lambda x: 2 * model(x)), SUBJECTS[0])
    with pytest.raises(AssertionError, match=f"{SUBJECTS[0].name} differs"):
        assert_same(SUBJECTS[0].model(), moved(SUBJECTS[0]), SUBJECTS[0])


def test_the_page_is_written_from_the_results_and_has_no_empty_cell() -> None:
    document = json.loads((DOCS / "matrix.json").read_text())
    assert matrix.problems(document["cells"]) == []
    assert (DOCS / "matrix.md").read_text() == matrix.page(document)


def test_empty_and_failing_cells_are_found() -> None:
    cells = {row: dict.fromkeys(matrix.SETTINGS, "passed") for row in matrix.ROWS}
    assert matrix.problems(cells) == []
    del cells["L2"]["ONNX"]
    cells["SRIP"]["DDP"] = "failed: tests/laws/test_x.py"
    assert matrix.problems(cells) == ["L2 × ONNX: empty", "SRIP × DDP: failed: tests/laws/test_x.py"]
