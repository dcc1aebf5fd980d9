"""`transformers:NAME` as a model: from a class, a type or a configuration, with random weights and nothing fetched."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from foreign import transformers
from gonio.errors import (
    GonioError,
    InvalidArgumentError,
    NotApplicableError,
    UnknownNameError,
    UnreadableFileError,
)
from gonio.models import by_name, resolve
from gonio.surgery import configured

TINY = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 4,
}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> None:
        raise AssertionError("a connection was asked for")

    transformers()
    monkeypatch.setattr(socket.socket, "connect", refused)


def write(folder: Path, **changes: Any) -> Path:
    data = {key: value for key, value in {**TINY, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def test_a_type_and_a_class_have_default_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, torch.device]] = []

    class Recorded(nn.Linear):
        config_class = SimpleNamespace

        def __init__(self, config: SimpleNamespace) -> None:
            super().__init__(2, getattr(config, "num_labels", 5))
            built.append((type(self).__name__, self.weight.device))

    class RecordedForSequenceClassification(Recorded):
        pass

    monkeypatch.setitem(vars(transformers()), "BertModel", Recorded)
    monkeypatch.setitem(vars(transformers()), "BertForSequenceClassification", RecordedForSequenceClassification)
    assert resolve("transformers:bert")(num_classes=3).out_features == 5
    assert resolve("transformers:BertModel")(num_classes=3).out_features == 5
    assert resolve("transformers:BertForSequenceClassification")(num_classes=3).out_features == 3
    assert [str(device) for _, device in built] == ["meta", "cpu"] * 3, "the size is known before memory is taken"


@pytest.mark.parametrize("file", ["", "config.json"])
def test_a_configuration_says_class_and_sizes(tmp_path: Path, file: str) -> None:
    factory = resolve(f"transformers:{write(tmp_path) / file}")
    model = factory(num_classes=3, in_channels=1)
    assert type(model).__name__ == "ViTForImageClassification"
    assert model(torch.zeros(2, 1, 16, 16)).logits.shape == (2, 3)
    assert factory()(torch.zeros(2, 3, 16, 16)).logits.shape == (2, 2)


def test_a_configuration_without_a_known_class_gives_the_types_own(tmp_path: Path) -> None:
    model = resolve(f"transformers:{write(tmp_path, architectures=['MineForEverything'])}")()
    assert type(model).__name__ == "ViTModel"
    assert type(resolve(f"transformers:{write(tmp_path, architectures=None)}")()).__name__ == "ViTModel"


def test_code_that_a_configuration_names_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'CANARY')!r}, 'w')")
    hostile = {"auto_map": {"AutoModel": "mine.Model"}, "attn_implementation": "someone/kernel"}
    hostile |= {"_attn_implementation": "someone/kernel", "_name_or_path": "someone/model"}
    model = resolve(f"transformers:{write(tmp_path, **hostile)}")()
    assert type(model).__module__.startswith("transformers.models.vit")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "mine.py"]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("bertt", UnknownNameError, r"no transformers model named 'bertt'\. Did you mean bert,"),
        ("BertMdel", UnknownNameError, r"Did you mean BertModel,"),
        ("AutoModel", UnknownNameError, "no transformers model named 'AutoModel'"),
        ("PreTrainedModel", UnknownNameError, "no transformers model named 'PreTrainedModel'"),
        ("pipeline", UnknownNameError, "no transformers model named 'pipeline'"),
        ("__class__", UnknownNameError, "no transformers model named '__class__'"),
        ("", UnknownNameError, "no transformers model named ''"),
        ("google/bert", InvalidArgumentError, r"no file 'google/bert'\. .*nothing is downloaded"),
        ("missing.json", InvalidArgumentError, "no file 'missing.json'"),
        ("LlamaModel", NotApplicableError, r"its weights would take 2\d GiB, more than this machine's memory"),
        ("BarkModel", NotApplicableError, "its configuration builds no model|more than this machine"),
    ],
)
def test_wrong_names_say_what_is_there(
    name: str, error: type[GonioError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configured, "memory", lambda: 2**20)
    with pytest.raises(error, match=message):
        resolve(f"transformers:{name}")()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", UnreadableFileError, "it is not JSON"),
        ("[" * 100_000, UnreadableFileError, "it is not JSON"),
        ("\xff", UnreadableFileError, "it is not JSON"),
        ("[]", UnreadableFileError, "it does not contain a mapping"),
        ("{}", UnknownNameError, "no transformers model named ''"),
        ('{"model_type": "mine"}', UnknownNameError, "no transformers model named 'mine'"),
        ('{"model_type": "vit", "quantization_config": {}}', NotApplicableError, "of a quantised model"),
        (
            '{"model_type": "vit", "hidden_size": "many"}',
            NotApplicableError,
            "^cannot build the model '.*': its configuration builds no model",
        ),
        (
            '{"model_type": "vit", "hidden_size": 7}',
            NotApplicableError,
            "^cannot build the model '.*': its configuration builds no model",
        ),
    ],
)
def test_wrong_configurations_are_one_error(tmp_path: Path, text: str, error: type[GonioError], message: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(error, match=message):
        resolve(f"transformers:{tmp_path}")()


def test_a_class_that_cannot_be_imported_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ModuleNotFoundError("could not import it") from RuntimeError("operator nms does not exist")

    library = ModuleType("transformers")
    library.models, library.__getattr__ = transformers().models, broken
    monkeypatch.setattr(by_name, "load_library", lambda package, spec: library)
    monkeypatch.setattr(configured, "_class_names", lambda library: {"BertModel"})
    with pytest.raises(NotApplicableError, match=r"cannot be imported .*operator nms does not exist"):
        resolve("transformers:BertModel")
