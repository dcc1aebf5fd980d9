"""Names of models: what each kind builds, and what an unknown one is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import foreign
from gonio.errors import InvalidArgumentError, MissingExtraError, NotApplicableError, UnknownNameError
from gonio.models import resolve
from gonio.models.by_name import code_digest

USER_FILE = """
from torch import nn

WIDTH = 7

def make(num_classes=2):
    return nn.Linear(WIDTH, num_classes)

def no_model():
    return 3
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(USER_FILE)
    return path


def test_built_in_model_gets_the_sizes() -> None:
    model = resolve("digits-cnn")(num_classes=5, in_channels=3)
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 5)


def test_user_file_gets_only_the_sizes_it_takes(user_file: Path) -> None:
    model = resolve(f"{user_file}:make")(num_classes=5, in_channels=3)
    assert isinstance(model, nn.Linear)
    assert (model.in_features, model.out_features) == (7, 5)


def test_digest_follows_the_file(user_file: Path) -> None:
    before = code_digest(f"{user_file}:make")
    user_file.write_text(USER_FILE + "# changed\n")
    assert before is not None
    assert code_digest(f"{user_file}:make") != before
    assert code_digest("digits-cnn") is None


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("digits-cn", UnknownNameError, r"no model named 'digits-cn'. Did you mean digits-cnn"),
        ("tim:resnet18", UnknownNameError, "no model named 'tim:resnet18'. Did you mean .*timm:NAME"),
        ("{file}", InvalidArgumentError, r"no name after it. Write .*net.py:NAME; it has .*make"),
        ("{file}:mak", UnknownNameError, r"no function in .*net.py named 'mak'. Did you mean make\?"),
        ("{file}:WIDTH", InvalidArgumentError, "must name a function; found an int"),
        ("absent.py:make", InvalidArgumentError, "no file '.*absent.py'"),
    ],
)
def test_wrong_names_say_what_is_there(user_file: Path, spec: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve(spec.format(file=user_file))


def test_factory_must_return_a_module(user_file: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must build a model; found that no_model\(\) returned an int"):
        resolve(f"{user_file}:no_model")()


@pytest.mark.parametrize("source", ["timm", "torchvision", "transformers"])
def test_absent_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setitem(sys.modules, source, None)
    with pytest.raises(MissingExtraError, match=rf"needs the package '{source}'.*gonio\[models\]"):
        resolve(f"{source}:resnet18")


def test_a_library_for_another_torch_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(NotApplicableError, match=r"the installed torchvision cannot be imported .*nms does not exist"):
        resolve("torchvision:resnet18")


class Recorder:
    """A library whose models record how they are created."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.models = self  # torchvision's functions lie one module deeper
        self.is_model = "resnet18".__eq__
        self.list_models = lambda: ["resnet18"]

    def create_model(self, name: str, **options: object) -> nn.Module:
        self.calls.append((name, options))
        return nn.Identity()

    get_model = create_model

    def get_model_builder(self, name: str) -> Callable[..., None]:
        return lambda *, weights=None, num_classes=None: None


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("timm", {"pretrained": False, "num_classes": 4, "in_chans": 1}),
        ("torchvision", {"weights": None, "num_classes": 4}),
    ],
)
def test_libraries_get_their_names_of_the_sizes_and_no_weights(
    monkeypatch: pytest.MonkeyPatch, source: str, options: dict[str, object]
) -> None:
    library = Recorder()
    monkeypatch.setitem(sys.modules, source, library)
    resolve(f"{source}:resnet18")(num_classes=4, in_channels=1)
    assert library.calls == [("resnet18", options)]
    with pytest.raises(UnknownNameError, match=rf"no {source} model named 'resnet1'\. Did you mean resnet18\?"):
        resolve(f"{source}:resnet1")


def test_the_part_of_a_model_of_torchvision_that_others_trained_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision = foreign.torchvision()
    loaded: list[str] = []

    def load(url: str, *_: object, **__: object) -> dict[str, object]:
        loaded.append(url)
        raise OSError(url)

    monkeypatch.setattr(torchvision.models._api, "load_state_dict_from_url", load)
    for name in ("fcn_resnet50", "ssdlite320_mobilenet_v3_large"):
        with torch.device("meta"):
            resolve(f"torchvision:{name}")(num_classes=3)
    assert not loaded
