"""What a newcomer passes by mistake is named, with what to pass instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gonio
from gonio.errors import InvalidArgumentError, UnreadableFileError
from gonio.measuring import explain
from gonio.models import resolve


class Net(nn.Linear):
    """A class of a user."""


def test_a_missing_file_is_compared_with_its_neighbours(tmp_path: Path) -> None:
    torch.save({"weight": torch.eye(3)}, tmp_path / "model.pt")
    with pytest.raises(UnreadableFileError, match=r"no such file. Did you mean .*/model\.pt\?"):
        gonio.measure(tmp_path / "modle.pt")
    with pytest.raises(UnreadableFileError, match=r"no such file\. Check the path"):
        gonio.measure(tmp_path / "empty" / "other.safetensors")
    with pytest.raises(UnreadableFileError, match="In Python pass the model itself"):
        gonio.measure("net.py:Net")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (Net, r"found the class Net\. Pass an instance of it: Net\(\.\.\.\)"),
        (torch.eye(3), r"found Tensor\. For one tensor use"),
        (None, r"found NoneType\. Pass one of them"),
        (3, "found int"),
        ({}, r"found a mapping with the keys \[\]"),
        ({"a": 1}, r"found a mapping with the keys \['a'\]"),
    ],
)
def test_what_is_no_source_is_named(source: object, what: str) -> None:
    with pytest.raises(InvalidArgumentError, match=what):
        gonio.measure(source)


@pytest.mark.parametrize("batch", ["8x3", (8, 3), [8, 3]])
def test_sizes_are_no_batch(batch: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"e\.g\. a tensor; found .*torch\.randn"):
        gonio.measure(nn.Linear(3, 2), batch=batch)


def test_a_batch_needs_a_model(tmp_path: Path) -> None:
    torch.save({"weight": torch.eye(3)}, tmp_path / "model.pt")
    with pytest.raises(InvalidArgumentError, match=r"found a path\. Pass the model, or no batch"):
        gonio.measure(tmp_path / "model.pt", batch=torch.ones(1, 3))


def test_a_finding_explains_itself() -> None:
    model = nn.Linear(8, 4)
    with torch.no_grad():
        model.weight[:2] = 0
    (finding,) = (finding for finding in gonio.measure(model).findings if finding.code == "G102")
    assert explain(finding) == explain("g102")


def test_a_checkpoint_is_no_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Linear(3, 2).state_dict(), "bad.pt")
    with pytest.raises(InvalidArgumentError, match=r"found the file 'bad\.pt'\. Name the function"):
        resolve("bad.pt")


def test_a_file_without_a_name_lists_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text("import os\n\nclass Net: ...\n\ndef make(): ...\n\ndef _hidden(): ...\n")
    with pytest.raises(InvalidArgumentError, match=r"no name after it\. Write .*net\.py:NAME; it has Net, make\."):
        resolve(str(path))
