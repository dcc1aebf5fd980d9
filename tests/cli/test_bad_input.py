"""No input is reported as a defect of gonio (exit code 70): each is one message, a code, and no file."""

from __future__ import annotations

import os
import pickle
import shlex
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cli.shell import COMMAND, SCRIPT, invoke, write_task
from gonio import models
from gonio.cli.inputs import read_source
from measuring.zoo_files import Runs

RECIPES = {
    "normed": "name: normed\nparametrize:\n  - {where: 'type:Linear', use: WeightNorm}\n",
    "bad": "name: bad\npenalty:\n  - {where: conv*, use: L3, strength: 1}\n  - {use: keep, a: 1}\n",
    "unmatched": "name: un\npenalty:\n  - {where: head, use: Orthogonality, strength: 1}\n",
    "count": "name: x\npenalty: [{where: 're:a{4294967295}', use: L2, strength: 1}]\n",
    "rules": "name: x\npenalty:\n" + "".join(f"  - {{where: 'none{i}', use: L2, strength: 1}}\n" for i in range(400)),
}
FILES = {
    **{f"{name}.yaml": text for name, text in RECIPES.items()},
    "codes.toml": "[per-layer-ignores]\n" + "".join(f'"a{i}" = ["Z{i}"]\n' for i in range(5000)),
    "bad.toml": '[per-layer-ignores]\n"re:a{4294967295}" = ["G101"]\n',
    "own_fit.py": SCRIPT,
    "exits.py": "import sys\nsys.exit(0)\n",
    "syntax.py": "def make(:\n",
    "other/pyproject.toml": "[project]\n",
    "large.toml": "#" * (1 << 21),
}
CHECKPOINTS = {
    "numbers": {1: torch.ones(4, 4)},
    "zeros": {"w": torch.zeros(100_000)},
    "wide": torch.zeros(1).expand(10**7, 1, 8, 8),
    "square": {"w": torch.zeros(1).expand(10**5, 10**5)},
    "long": {"x" * 5000 + str(i): torch.ones(2) for i in range(400)},
    "other": {"v": torch.ones(2, 2)},
    "list": [1, 2],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    write_task(folder)
    for name in ("cut", "other"):
        (folder / name).mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name, content in CHECKPOINTS.items():
        torch.save(content, folder / f"{name}.pt")
    state = models.digits_cnn().state_dict()
    torch.save(state, folder / "fine.pt")
    evil = {"gonio.recipe": "!!python/object/apply:os.system ['touch CANARY']"}
    save_file(state, folder / "hostile.safetensors", metadata=evil)
    with zipfile.ZipFile(folder / "zeros.pt") as source, zipfile.ZipFile(folder / "bomb.pt", "w", 8) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry.filename))
    gadget = Runs(open, "CANARY", "w")
    (folder / "gadget.pt").write_bytes(pickle.dumps(gadget))
    numpy.save(folder / "objects.npy", numpy.array([gadget], dtype=object), allow_pickle=True)
    for path in ("cut.safetensors", "cut/cut.safetensors", "bytes.toml"):
        (folder / path).write_bytes(b"\xff" * 20)
    return folder


MODEL = "--model digits-cnn"
SAVED = f"{MODEL} -o o.pt"
DAMAGED = "damaged or holds more than tensors"
LARGE = "the repetition number is too large"
REFUSED = {
    "apply": [
        (f"orthogonal-init bomb.pt {SAVED}", 3, "its archive would unfold to"),
        (f"orthogonal-init numbers.pt {SAVED}", 3, "the key 1 is not text"),
        (f"orthogonal-init fine.pt {SAVED} --seed " + "9" * 30, 2, "'--seed'"),
        (f"normed.yaml missing.pt {SAVED}", 3, "there is no such file"),
        (f"normed.yaml gadget.pt {SAVED}", 3, "Code in a file is never run here"),
        (f"normed.yaml cut.safetensors {SAVED}", 3, "it is not an intact file"),
        (f"normed.yaml normed.yaml {SAVED}", 2, "a checkpoint ends in"),
        (f"normed.yaml fine.pt {MODEL} -o o.onnx", 2, "a checkpoint ends in"),
        (f"normed.yaml fine.pt {MODEL} -o no/where/o.pt", 2, "no folder"),
        ("normed.yaml fine.pt --model tiny.py:linear -o o.pt", 3, "2 missing (1.weight, 1.bias); 22 unknown (conv1.we"),
        (f"norm.yaml fine.pt {SAVED}", 3, "norm.yaml: cannot be read"),
        (f"normed.yaml hostile.safetensors {SAVED}", 3, "the recipe in hostile"),
    ],
    "fold": [
        (f"fine.pt {SAVED} --where re:a{{4294967295}}", 2, LARGE),
        (f"square.pt {SAVED}", 3, "a tensor has 10,000,000,000 entries, of which 1 are stored"),
        (f"bomb.pt {SAVED}", 3, "its archive would unfold to"),
        (f"numbers.pt {SAVED}", 3, "the key 1 is not text"),
        (f"fine.pt {SAVED} --where fc*", 3, "where=fc* matches no suitable module"),
        (f"fine.pt {SAVED} --batch '2;1'", 2, "positive sizes joined by x"),
        (f"fine.pt {SAVED} --batch 2x3x8x8", 2, "must be an input that the model takes"),
    ],
    "plan": [
        ("", 2, "Missing argument 'RECIPE'"),
        ("scale-shift", 2, "Missing option '--model'"),
        (f"count.yaml {MODEL}", 3, "penalty[1].where: where takes a regular expression; found 'a{4294967295}'"),
        (f"scaleshift {MODEL}", 2, "no recipe named 'scaleshift'. Did you mean scale-shift"),
        (f"missing.yaml {MODEL}", 3, "missing.yaml: cannot be read: there is no such file"),
        (f". {MODEL}", 3, "it is not a regular file"),
        (f"bad.yaml {MODEL}", 3, "bad.yaml:3: penalty[1].use: there is no entry of penalty named 'L3'"),
        (f"bad.yaml {MODEL}", 3, "bad.yaml:4: penalty[2].a: `keep` takes no options"),
        (f"unmatched.yaml {MODEL}", 3, "unmatched.yaml:3: rule 1 of penalty (head: Orthogonality(strength=1))"),
        (f"tiny.py {MODEL}", 3, "tiny.py"),
        ("scale-shift --model digitscnn", 2, "no model named 'digitscnn'. Did you mean digits-cnn"),
        ("scale-shift --model tiny.py:no_such", 2, "no function in tiny.py named 'no_such'"),
        ("scale-shift --model tiny.py:no_task", 3, "tiny.py:no_task raised ValueError: no data today"),
        ("scale-shift --model tiny.py:no_model", 2, "must build a model; found that no_model() returned an int"),
        ("scale-shift --model missing.py:make", 2, "missing.py"),
        ("scale-shift --model syntax.py:make", 3, "syntax.py:make raised SyntaxError"),
        ("scale-shift --model exits.py:make", 3, "exits.py:make raised SystemExit"),
    ],
    "measure": [
        ("fine.pt --seed 3", 2, "--seed has no effect here; found files alone, whose weights are not random. Leave it"),
        (f"fine.pt {MODEL} --seed 3", 2, "--seed has no effect here"),
        ("fine.pt fine.pt --seed 3", 2, "--seed has no effect here"),
        ("fine.pt --task digits", 2, "--task has no effect here; found no --widths. Leave it out."),
        ("digits-cnn --key ema", 2, "--key has no effect here; found no checkpoint"),
        ("digitscnn", 2, "no model named 'digitscnn'. Did you mean digits-cnn"),
        ("missing.pt", 3, "there is no such file"),
        ("missing.safetensors", 3, "there is no such file"),
        ("gadget.pt", 3, "Code in a file is never run"),
        ("cut.safetensors", 3, "not an intact file"),
        ("cut", 3, "not an intact file"),
        ("tiny.py:no_task", 3, "tiny.py:no_task raised ValueError: no data today (tiny.py, line "),
        ("tiny.py", 2, "no name after it"),
        ("fine.pt --config bad.toml", 3, LARGE),
        ("fine.pt --config missing.toml", 3, "there is no such file"),
        ("fine.pt --config other/pyproject.toml", 3, "it has no table [tool.gonio]"),
        ("fine.pt --config bytes.toml", 3, "it is not valid TOML"),
        ("fine.pt --config large.toml", 3, "it is larger than 1024 KiB"),
        ("fine.pt --ignore G10", 2, "no rule named 'G10'. Did you mean G"),
        ("fine.pt --headers --ignore G101", 2, "--ignore cannot be combined with"),
        ("fine.pt --headers --config x.toml", 2, "--config cannot be combined with"),
        ("fine.pt --model digits-cnn --headers", 2, "--model cannot be combined with --headers"),
        ("other.pt --model digits-cnn", 3, "1 unknown (v)"),
        ("digits-cnn --batch '4;1;8;8'", 2, "positive sizes joined by x"),
        ("digits-cnn --batch 4x0x8", 2, "positive sizes joined by x"),
        ("digits-cnn --batch 9999999x9999999x9999999", 2, "positive sizes joined by x"),
        ("digits-cnn --batch 46341x46340", 2, "--batch takes positive sizes"),
        ("digits-cnn --batch " + "9" * 5000, 2, "--batch takes positive sizes"),
        (
            "digits-cnn --batch 4x3x8x8",
            2,
            "must be an input that the model takes; found 3 channels at the layer 'conv1', which takes 1",
        ),
        ("digits-cnn --batch missing.pt", 3, "there is no such file"),
        ("digits-cnn --batch gadget.pt", 3, DAMAGED),
        ("digits-cnn --batch cut.safetensors", 3, DAMAGED),
        ("digits-cnn --batch objects.npy", 3, DAMAGED),
        ("digits-cnn --batch list.pt", 3, "it holds a list"),
        ("digits-cnn --batch bomb.pt", 3, "its archive would unfold to"),
        ("digits-cnn --batch wide.pt", 3, "a tensor has 640,000,000 entries, of which 1 are stored"),
        ("fine.pt --batch 4x1x8x8", 2, "Add --model FILE.py:FACTORY"),
        ("fine.pt fine.pt --batch 4x1x8x8", 2, "--batch cannot be combined with two sources; found both"),
        ("fine.pt fine.pt --headers", 2, "--headers cannot be combined with two sources; found both"),
        ("fine.pt fine.pt --also operator_norm", 2, "--also cannot be combined with two sources; found both"),
        ("fine.pt fine.pt --ignore G501", 2, "--ignore cannot be combined with two sources; found both"),
        ("fine.pt fine.pt --config x.toml", 2, "--config cannot be combined with two sources; found both"),
        ("fine.pt other.pt", 2, "found no name in common: conv1.weight"),
        ("digits-cnn fine.pt fine.pt --engine ray", 2, "distributes the tensors of files; found Sequential"),
        ("tiny.py:linear --widths 8,x", 2, "--widths takes whole numbers joined by commas; found '8,x'"),
        ("digits-cnn --widths 8,16", 2, "--widths takes a file.py:factory of the width"),
        ("tiny.py:linear fine.pt --widths 8,16", 2, "a second source cannot be combined with --widths"),
    ],
    "doctor": [
        ("fine.pt --seed 3", 2, "--seed has no effect here; found files alone, whose weights are not random."),
        ("fine.pt --unproven", 2, "--unproven needs the model of the checkpoint; found a file alone."),
    ],
    "meazure": [("", 2, "No such command 'meazure'")],
    "explain": [("G002", 2, "no rule, column or claim named 'G002'. `gonio list rules` shows all codes.")],
    "compare": [
        ("--sedes 3", 2, "No such option"),
        ("--seeds 0", 2, "Invalid value for '--seeds'"),
        ("--seeds many", 2, "Invalid value for '--seeds'"),
        ("--seeds 99999999999999999999 --dry-run", 2, "'--seeds'"),
        ("--first-seed 9223372036854775807 --dry-run", 2, "'--first-seed'"),
        ("--task bytes --robust", 2, "--robust needs a task whose inputs have small disturbances; 'bytes'"),
        ("--task imagefolder:nowhere", 2, "needs a folder of images; found no folder"),
        ("--tune -1", 2, "--tune"),
        ("--first-seed 1000000", 2, "must not be those of tuning and of attacks; found 1000003"),
        ("scaleshift", 2, "no recipe named 'scaleshift'. Did you mean scale-shift"),
        ("--task digit", 2, "no task named 'digit'. Did you mean digits"),
        ("--model digitscnn", 2, "no model named 'digitscnn'. Did you mean digits-cnn"),
        ("missing.yaml", 3, "missing.yaml: cannot be read: there is no such file"),
        ("switchable-norm --model tiny.py:linear", 3, "rule 1 of swap"),
        ("scale-shift --task tiny.py:no_task", 3, "tiny.py:no_task raised ValueError: no data today"),
        ("scale-shift scale-shift", 2, "scale-shift more than once"),
        ("--schedule linear", 2, "schedule must be one of cosine, constant, step, one-cycle; found 'linear'"),
        ("--batch-size 300", 2, "batch_size must be at most the 200 training examples of 'digits'; found 300"),
        ("--device tpu", 2, "a device is cpu, cuda, cuda:N or mps; found 'tpu'"),
        ("--epsilon 0.1", 2, "--robust with --script needs --epsilon, and --epsilon needs both"),
        ("scale-shift --script own_fit.py:train --task tiny.py:tiny", 2, "found --task or --model beside it"),
        ("scale-shift --script own_fit.py:train --model digits-cnn", 2, "found --task or --model beside it"),
        (
            *("scale-shift --script own_fit.py:train --epochs 3", 2),
            "--epochs: the training is gonio's; found --script beside",
        ),
        (
            *("scale-shift --script own_fit.py:train --workers 2", 2),
            "--workers has no effect here; found --script, which loads its own data",
        ),
        ("scale-shift --script own_fit.py:train --robust", 2, "--robust with --script needs --epsilon"),
        ("scale-shift --script absent.py:train", 2, "no file"),
        ("scale-shift --direction min", 2, "describe the score of a script; found no --script"),
        ("scale-shift --dry-run --engine slurm", 2, "there is no engine named 'slurm'. Known: local, ray"),
        ("scale-shift --dry-run --cpus 2", 2, "--cpus and --gpus need --engine ray; found --engine local"),
        ("scale-shift --engine slurm", 2, "there is no engine named 'slurm'. Known: local, ray"),
        (
            *("scale-shift --task tiny.py:tiny --gpus 1", 2),
            "--cpus and --gpus need --engine ray; found --engine local",
        ),
    ],
    "reproduce": [
        ("gain-tan", 2, "there is no claim named 'gain-tan'. Did you mean gain-tanh"),
        ("gain-tanh --model digits-cnn", 2, "differ in arguments of deep-mlp"),
        ("bn-falls --data nowhere", 2, "needs the file train-images-idx3-ubyte.gz"),
        ("gain-tanh --seeds 0", 2, "Invalid value for '--seeds'"),
        ("gain-tanh --list --json out.json", 2, "--json writes the verdicts of runs; found --list"),
        ("gain-tanh --dry-run --json out.json", 2, "--json writes the verdicts of runs; found --dry-run"),
    ],
}


def files(folder: Path) -> list[Path]:
    """All that is in a folder, but for what Python compiles of a user's file."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [(f"{command} {words}", code, said) for command, rows in REFUSED.items() for words, code, said in rows],
)
def test_it_is_refused_in_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: int, message: str
) -> None:
    if words.startswith("compare"):
        pytest.importorskip("scipy")
    monkeypatch.chdir(folder)
    before = files(folder)
    result = invoke(*shlex.split(words))
    assert message in " ".join(result.stderr.split())
    assert (result.exit_code, result.stdout) == (code, "")
    assert len(result.stderr) < 700
    assert "Traceback" not in result.stderr
    assert files(folder) == before, "nothing was written, and no code in a file was run"


@pytest.mark.parametrize(
    "words",
    [
        "apply orthogonal-init long.pt --model digits-cnn -o o.pt",
        "fold long.pt --model digits-cnn -o o.pt",
        "measure long.pt --model digits-cnn",
        "measure fine.pt --config codes.toml",
        "plan rules.yaml --model digits-cnn",
    ],
)
def test_a_message_is_short_whatever_the_file_holds(folder: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.chdir(folder)
    result = invoke(*words.split())
    assert (result.exit_code, result.stdout, len(result.stderr) < 20_000) == (3, "", True)


@pytest.mark.slow
@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_is_no_defect(folder: Path, closed: int) -> None:
    words = [*COMMAND, "measure", str(folder / "fine.pt")]
    result = subprocess.run(words, capture_output=True, text=True, check=False, preexec_fn=lambda: os.close(closed))
    assert (result.returncode, "conv2" in result.stdout) == (0, closed == 2)
    assert result.stderr == ""


@pytest.mark.slow
def test_an_encoding_that_lacks_a_character_gets_a_replacement(folder: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "COLUMNS": "100"}
    words = [*COMMAND, "measure", str(folder / "fine.pt")]
    result = subprocess.run(words, capture_output=True, env=environment, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"conv2" in result.stdout
    assert b"?" in result.stdout


@pytest.mark.parametrize("verb", ["check", "measure", "doctor"])
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("other/mine", r"there is no such file. Did you mean other/mine.pth?"),
        (
            "other/mi*",
            "It is a pattern, which the shell replaces only outside quotation marks; it matches other/mine.pth.",
        ),
    ],
)
def test_a_file_without_its_ending_and_a_quoted_pattern_are_no_models_of_a_hub(
    verb: str, word: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    torch.save({"w": torch.ones(2, 2)}, "other/mine.pth")
    result = invoke(verb, word)
    assert (result.exit_code, said in result.stderr) == (3, True)


@pytest.mark.parametrize("word", ["./modle", "runs/modle", "~/modle", "/nowhere/model"])
def test_a_word_that_is_a_path_by_its_form_is_no_model(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (Path("model"), Path("runs/model")):
        folder.mkdir(parents=True)
        torch.save({"w": torch.ones(2, 2)}, folder / "mine.pth")
    result = invoke("measure", word)
    assert (result.exit_code, "there is no such file" in result.stderr) == (3, True)
    assert ("Did you mean" in result.stderr) == (not word.startswith(("~", "/")))


def test_the_configuration_of_a_library_s_model_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words `transformers:FOLDER/config.json` end as a file does."""
    asked: list[str] = []

    def resolve(spec: str) -> Callable[..., nn.Module]:
        asked.append(spec)
        return lambda: nn.Linear(2, 2)

    monkeypatch.setattr(models, "resolve", resolve)
    built = read_source("transformers:mine/config.json", seed=0)
    assert (asked, type(built)) == (["transformers:mine/config.json"], nn.Linear)
