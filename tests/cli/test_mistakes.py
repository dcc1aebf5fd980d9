"""Mistakes of newcomers: each gets one sentence that names the problem and the nearest right thing."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gonio
from cli.shell import invoke
from foreign import timm
from gonio import init
from gonio import regularizers as R
from gonio.cli.app import _plan_changes
from gonio.errors import GonioError, PlanChangedError

FILES = {
    "nets.py": "def model():\n    raise ValueError('oops')\n\n\ndef five():\n    return 5\n",
    "mine.py": "def train(run):\n    pass\n",
    "hello.pt": "hello world, this is text",
    "x.onnx": "hello world, this is text",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    torch.save(gonio.models.digits_cnn().state_dict(), folder / "whole.pt")
    (folder / "cut.pt").write_bytes((folder / "whole.pt").read_bytes()[:5000])
    torch.save(nn.L1Loss(), folder / "module.pt")
    (folder / "several").mkdir()
    for name in ("a.pt", "b.gguf", "c.safetensors", "d.safetensors"):
        (folder / "several" / name).touch()
    torch.save({"epoch": 3}, folder / "epoch.pt")
    torch.save({"model.layers.0.q_proj.weight": torch.ones(4, 4)}, folder / "llama.pt")
    torch.save({"layer1.0.conv1.weight": torch.ones(4, 4, 3, 3)}, folder / "resnet.pt")
    (folder / "-w.pt").touch()
    (folder / "linked.pt").symlink_to("whole.pt")
    for name in ("several/config.json", "batch.pt", "part.safetensors", "claim.yaml"):
        (folder / name).write_text("{}", encoding="utf-8")
    (folder / "shards.index.json").write_text('{"weight_map": {"w": "part.safetensors"}}', encoding="utf-8")
    return folder


TYPED = {
    1: ("mesure whole.pt", 2, "No such command 'mesure'. Did you mean 'measure'?"),
    2: ("measure nofile.pt", 3, "there is no such file. Did you mean whole.pt"),
    3: ("measure resnet50", 2, "no model named 'resnet50'. Did you mean timm:resnet50 or torchvision:resnet50?"),
    4: ("measure timm:resnet51", 2, "no timm model named 'resnet51'. Did you mean resnet51q, resnet50"),
    5: ("measure gpt2", 2, "where `hf download gpt2` puts it. For random weights write transformers:gpt2."),
    6: ("measure cut.pt", 3, "it is damaged: the end of the archive is missing. Copy, download or save it again."),
    7: ("measure module.pt", 3, "Code in a file is never run here: save model.state_dict()"),
    8: ("measure hello.pt", 3, "it begins with b'hell'. Save model.state_dict()."),
    9: ("measure epoch.pt", 2, "found a mapping with the keys ['epoch']. Pass the state dict itself, or store it"),
    10: ("measure nets.py:model", 3, "nets.py:model raised ValueError: oops (nets.py, line 2, in model)"),
    11: ("measure nets.py:five", 2, "found that five() returned an int. Return a torch.nn.Module."),
    12: ("measure nets.py", 2, "found no name after it. Write nets.py:NAME; it has model, five."),
    13: ("measure llama.pt --model digits-cnn", 3, "No name is in both: the checkpoint is of another architecture."),
    14: ("measure digits-cnn --batch 4x3x8x8", 2, "found 3 channels at the layer 'conv1', which takes 1. Give an input "
         "of the sizes 4x1x8x8."),
    16: ("measure resnet.pt llama.pt", 2, "They look like two architectures; if they are one, rename the keys"),
    17: ("measure whole.pt --fail-on warning", 2, "'--fail-on': 'warning' is not one of 'info', 'warn', 'error'. Did "
         "you mean 'warn'?"),
    18: ("compare --seeds 0", 2, "Invalid value for '--seeds': it must be 1 or more"),
    20: ("measure x.onnx", 3, "it is not an intact file of its kind"),
    21: ("compare orthogonal", 2, "no recipe named 'orthogonal'. orthogonal is the method of orthogonal-init"),
    22: ("compare --task mnist", 2, "Did you mean torchvision:MNIST:FOLDER, with the folder that holds its files?"),
    24: ("compare orthogonal-init --script mine.py", 2, "gonio: 'mine.py' must name a function or class in the file; "
         "found no name after it. Write mine.py:train."),
    25: ("reproduce som-accuracy", 2, "e.g. by torchvision.datasets.FashionMNIST('data', download=True), which puts "
         "them into data/FashionMNIST/raw, and name their folder with --data."),
    31: ("check gpt2", 3, "there is no such file. Check the path. Nothing is downloaded: give a folder or a file of "
         "its weights on this machine. A model of a hub is looked for in "),
    32: ("check https://huggingface.co/org/gpt2", 3, "file 'https://huggingface.co/org/gpt2': cannot be read; it is "
         "an address, not a file. Nothing is downloaded"),
    33: ("check https://hub.example/gpt2", 3, "Nothing is downloaded: fetch the file first, and give its path"),
    34: ("check whole.pt --html x.html", 2, "No such option: --html. It is one of gonio measure and gonio report."),
    35: ("measure whole.pt --htm x.html", 2, "No such option: --htm. Did you mean --html?"),
    36: ("measure whole.pt --model my_cnn:make", 2, "For a function of your own write FILE.py:FUNCTION, e.g. "
         "my_cnn.py:make."),
    37: ("check several", 3, "it holds several: a.pt, b.gguf, c.safetensors, d.safetensors. Name one of them."),
    38: ("explain CODE", 2, "no rule, column or claim named 'CODE'. Give a code such as G102"),
    39: ("measure x.onnx --model digits-cnn", 2, "found '.onnx'. gonio check x.onnx and gonio measure x.onnx read it "
         "without a model."),
}  # fmt: skip
NEEDS = {3: ("timm", "torchvision"), 5: ("transformers",), 20: ("onnx",), 22: ("torchvision",)}


SLOW = (4, 21)  # they import timm, and load a task


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in TYPED])
def test_a_typed_mistake(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    words, code, message = TYPED[number]
    for package in NEEDS.get(number, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if number == 4:
        timm()
    if words.startswith(("compare", "reproduce")):
        pytest.importorskip("scipy")
    monkeypatch.chdir(folder)
    result = invoke(*shlex.split(words))
    said = " ".join(result.stderr.split())
    assert message in said
    assert (result.exit_code, result.stdout) == (code, "")
    assert "Value error" not in said
    assert "Input should" not in said


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "https://hub.example/gpt2"])
def test_a_name_on_a_hub_is_not_downloaded(name: str) -> None:
    result = invoke("measure", name)
    assert "Nothing is downloaded: " in result.stderr
    assert result.exit_code == 2


def test_15_commas_join_sizes_too() -> None:
    shown = [invoke("measure", "digits-cnn", "--batch", sizes) for sizes in ("4,1,8,8", "4x1x8x8")]
    assert shown[0].exit_code == 0
    assert shown[0].stdout == shown[1].stdout


def test_19_a_short_help() -> None:
    for command in ("measure", "compare"):
        assert invoke(command, "-h").stdout == invoke(command, "--help").stdout


def test_23_another_plan_for_a_study() -> None:
    said = _plan_changes(PlanChangedError("study", [("seeds", "8", "6")]))
    assert "choose another folder (-o NEW)" in said


WRITTEN: dict[int, tuple[Callable[[nn.Module], object], str]] = {
    26: (lambda m: gonio.Penalty(m, R.Orthogonality(1e-3)), r"write Penalty\(model, \[\(None, Orthogonality"),
    27: (lambda m: gonio.init_(m, nn.init.orthogonal_), r"Pass gonio\.init\.orthogonal_"),
    28: (lambda m: gonio.init_(m, init.orthogonal_, where="Conv2d"), r"for the class write 'type:Conv2d'"),
    29: (lambda m: gonio.measure(m, batch=torch.ones(4, 3, 8, 8)), r"3 channels at the layer 'conv1', which takes 1\. "
         r"Give an input of the sizes 4x1x8x8"),
    30: (lambda m: gonio.Recipe("decoupled-tanh"), r"Write gonio\.Recipe\.load\('decoupled-tanh'\)"),
}  # fmt: skip


@pytest.mark.parametrize("number", WRITTEN)
def test_a_mistake_in_python(number: int) -> None:
    act, message = WRITTEN[number]
    with pytest.raises(GonioError, match=message):
        act(gonio.models.digits_cnn())  # type: ignore[arg-type]


def test_a_recipe_of_rules_may_have_any_name() -> None:
    rules = gonio.Recipe.load("decoupled-tanh")
    assert gonio.Recipe("decoupled-tanh", swap=rules.swap).rules("swap") == rules.swap
    assert gonio.Recipe("my-own").rules("swap") == ()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 65), r"65 features at the layer '0', which takes 64\. Give an input of the sizes 4x64"),
        ((4, 64), ""),
    ],
)
def test_the_layer_that_an_input_does_not_fit_is_named(shape: tuple[int, ...], message: str) -> None:
    model = nn.Sequential(nn.Linear(64, 3), nn.ReLU())
    if message:
        with pytest.raises(GonioError, match=message):
            gonio.measure(model, batch=torch.ones(shape))
    else:
        assert gonio.measure(model, batch=torch.ones(shape)).signals


def test_another_error_of_the_model_stays_as_it_is() -> None:
    class Refuses(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        gonio.measure(nn.Sequential(Refuses(4, 4)), batch=torch.ones(2, 4))


@pytest.mark.parametrize("path", ["tensorboard", "runs/exp1"])
def test_a_tracker_takes_no_name_of_a_logger(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GonioError, match=r"pass torch\.utils\.tensorboard\.SummaryWriter\(\)"):
        gonio.Tracker(nn.Linear(4, 4), path)
    with pytest.raises(GonioError, match=r"found no folder 'runs' for 'a\.csv'\. Create it"):
        gonio.Tracker(nn.Linear(4, 4), "runs/a.csv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("whole.pt", 2, "No such command 'whole.pt'. Did you mean gonio check whole.pt?"),
        ("several", 2, "No such command 'several'. Did you mean gonio check several?"),
        ("mesure", 2, "No such command 'mesure'"),
        ("check -w.pt", 2, "No such option: -w. For the file write ./-w.pt."),
        ("check whole.pt --zzz", 2, "Error: No such option: --zzz."),
        ("--zzz", 2, "Error: No such option: --zzz."),
        ("--langg zh", 2, "Error: No such option: --langg. Did you mean --lang?"),
        ("status a b", 2, "Got unexpected extra argument(s) (b)."),
        ("check whole.pt --jobs many", 2, "Invalid value for '--jobs': it must be a whole number."),
        ("measure whole.pt --html several", 2, "cannot write 'several'; found a folder. Name a file in it."),
        ("check whole.pt --json several", 2, "cannot write 'several'; found a folder. Name a file in it."),
        (
            "check whole.pt --save whole.pt",
            2,
            "cannot write 'whole.pt'; found a file that this command reads (whole.pt)",
        ),
        (
            "check whole.pt --save several/a.pt --json several/../whole.pt",
            2,
            "a file that this command reads (whole.pt)",
        ),
        ("check several --json several/a.pt", 2, "found a file that this command reads (several). Name another file."),
        ("measure whole.pt --json x --csv ./x", 2, "cannot write './x'; found one file for --json and --csv."),
        (
            "measure whole.pt whole.pt --html whole.pt",
            2,
            "cannot write 'whole.pt'; found a file that this command reads",
        ),
        ("doctor whole.pt --json whole.pt", 2, "cannot write 'whole.pt'; found a file that this command reads"),
        (
            "apply orthogonal-init whole.pt --model digits-cnn -o whole.pt",
            2,
            "a file that this command reads (whole.pt)",
        ),
        (
            "apply orthogonal-init whole.pt --model digits-cnn -o several/../whole.pt",
            2,
            "this command reads (whole.pt)",
        ),
        ("apply orthogonal-init linked.pt --model digits-cnn -o whole.pt", 2, "this command reads (linked.pt)"),
        ("apply orthogonal-init whole.pt --model digits-cnn -o linked.pt", 2, "this command reads (whole.pt)"),
        ("apply orthogonal-init several --model digits-cnn -o several/a.pt", 2, "this command reads (several)"),
        ("fold whole.pt --model digits-cnn -o whole.pt", 2, "a file that this command reads (whole.pt). Name another"),
        ("fold whole.pt --model digits-cnn --batch batch.pt -o batch.pt", 2, "this command reads (batch.pt)"),
        ("fold shards.index.json --model digits-cnn -o part.safetensors", 2, "this command reads (shards.index.json)"),
        ("check shards.index.json --json part.safetensors", 2, "this command reads (shards.index.json)"),
        ("check several --json several/config.json", 2, "found a file that this command reads (several)"),
        ("doctor several -o several", 2, "not 'several'; found the folder of a model that this command reads. Name"),
        ("reproduce weight-norm-grows --json nowhere/a.json", 2, "found no folder 'nowhere'. Create it."),
        ("reproduce claim.yaml --json claim.yaml", 2, "found a file that this command reads (claim.yaml)"),
        (
            "plan weissi --model digits-cnn",
            2,
            "there is no recipe named 'weissi'. weissi is the method of scale-shift.",
        ),
    ],
)
def test_a_word_in_the_wrong_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: int, message: str
) -> None:
    monkeypatch.chdir(folder)
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    result = invoke(*shlex.split(words))
    assert message in " ".join(result.stderr.split())
    assert (result.exit_code, result.stdout) == (code, "")
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
