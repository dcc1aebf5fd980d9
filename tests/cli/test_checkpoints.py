"""`gonio apply` and `gonio fold`: from a plain checkpoint to an edited one and back."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import gonio
from cli.shell import invoke, write_task
from gonio import models
from gonio.cli.checkpoint import Checkpoint, read, restored_model, write
from gonio.errors import NotApplicableError

RECIPE = "name: normed\nparametrize:\n  - {where: 'type:Linear', use: WeightNorm}\n"
MODEL = ("--model", "digits-cnn")


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model whose state dict lies in plain.pt and plain.safetensors of the working folder."""
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path)
    Path("normed.yaml").write_text(RECIPE)
    model = models.digits_cnn()
    model(torch.randn(4, 1, 8, 8))
    torch.save(model.state_dict(), "plain.pt")
    save_file(model.state_dict(), "plain.safetensors")
    return model.eval()


@pytest.mark.parametrize("source", ["plain.pt", "plain.safetensors"])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_there_and_back_is_the_same_function(plain: nn.Module, source: str, suffix: str) -> None:
    applied = invoke("apply", "normed.yaml", source, *MODEL, "-o", f"normed{suffix}")
    assert applied.exit_code == 0
    assert "fc1  weight = WeightNorm" in applied.stdout
    assert applied.stderr == f"checkpoint written to normed{suffix}\n"
    folded = invoke("fold", f"normed{suffix}", *MODEL, "-o", "back.safetensors", "--where", "fc*")
    assert folded.exit_code == 0, folded.stderr
    assert "it loads into the model" in folded.stderr
    back = models.digits_cnn()
    back.load_state_dict(load_file("back.safetensors"))
    assert gonio.equivalent(plain, back, example=torch.randn(2, 1, 8, 8)).relative < 1e-6


def test_the_recipe_travels_with_the_checkpoint(plain: nn.Module) -> None:
    invoke("apply", "normed.yaml", "plain.pt", *MODEL, "-o", "a.safetensors", "--seed", "7")
    assert "fc1.weight_parametrization.magnitude" in load_file("a.safetensors")
    Path("normed.yaml").unlink()
    assert invoke("fold", "a.safetensors", *MODEL, "-o", "b.pt").exit_code == 0
    content = torch.load("b.pt", weights_only=True)
    assert "conv1.bias" in content["state_dict"]
    assert not any("parametrization" in name for name in content["state_dict"])


def test_fold_compares_on_an_input(plain: nn.Module) -> None:
    result = invoke("fold", "plain.pt", *MODEL, "-o", "folded.pt", "--batch", "2x1x8x8")
    assert result.exit_code == 0
    assert "norm1  BatchNorm2d folded into conv1" in result.stdout
    assert "largest deviation" in result.stdout
    assert "it has 3 tensors that the model lacks, and lacks 15 that the model has" in result.stderr


def test_fold_is_told_the_recipe_of_a_checkpoint_that_does_not_say(plain: nn.Module) -> None:
    gonio.Recipe.load("normed.yaml").apply_(plain)
    torch.save(plain.state_dict(), "trained.pt")
    refused = invoke("fold", "trained.pt", *MODEL, "-o", "b.pt")
    assert refused.exit_code == 3
    assert "fc1.weight_parametrization" in refused.stderr
    assert not Path("b.pt").exists()
    result = invoke("fold", "trained.pt", *MODEL, "-o", "b.pt", "--recipe", "normed.yaml", "--batch", "2x1x8x8")
    assert result.exit_code == 0


def test_initialising_depends_on_the_seed(plain: nn.Module) -> None:
    def weights(seed: int) -> torch.Tensor:
        invoke("apply", "orthogonal-init", "plain.pt", *MODEL, "-o", "out.safetensors", "--seed", str(seed))
        return load_file("out.safetensors")["conv2.weight"]

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_penalty_leaves_no_trace_and_that_is_said(plain: nn.Module) -> None:
    result = invoke("apply", "scale-shift", "plain.pt", *MODEL, "-o", "out.safetensors")
    assert "acts during training only" in result.stderr
    before, after = load_file("plain.safetensors"), load_file("out.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_optimizer_and_a_hold_leave_no_trace_and_that_is_said(plain: nn.Module) -> None:
    result = invoke("apply", "hyperball", "plain.pt", *MODEL, "-o", "out.safetensors")
    for part in ("optimizer", "hold"):
        assert f"the recipe's {part} acts during training only; the checkpoint does not contain it" in result.stderr
    before, after = load_file("plain.safetensors"), load_file("out.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert invoke("fold", "out.safetensors", *MODEL, "-o", "folded.safetensors").exit_code == 0


def test_a_recipe_goes_on_a_plain_checkpoint(plain: nn.Module) -> None:
    invoke("apply", "normed.yaml", "plain.pt", *MODEL, "-o", "a.safetensors")
    result = invoke("apply", "scale-shift", "a.safetensors", *MODEL, "-o", "b.safetensors")
    assert result.exit_code == 3
    assert "the recipe 'normed' was applied to it before" in result.stderr


def test_a_tied_weight_is_written_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tied.py").write_text(
        "from torch import nn\n\ndef make():\n"
        "    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))\n"
        "    model[2].weight = model[0].weight\n    return model\n"
    )
    Path("normed.yaml").write_text(RECIPE)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    torch.save(model.state_dict(), "plain.pt")
    words = ("--model", "tied.py:make")
    assert invoke("apply", "normed.yaml", "plain.pt", *words, "-o", "a.safetensors").exit_code == 0
    folded = invoke("fold", "a.safetensors", *words, "-o", "b.safetensors", "--batch", "3x4")
    assert folded.exit_code == 0, folded.stderr
    assert torch.allclose(load_file("b.safetensors")["2.weight"], model[0].weight)


def metadata(path: str) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def test_the_header_says_recipe_hash_seed_and_versions(plain: nn.Module) -> None:
    invoke("apply", "normed.yaml", "plain.pt", *MODEL, "-o", "a.safetensors", "--seed", "7")
    recipe = gonio.Recipe.load("normed.yaml")
    versions = {"format": "pt", "gonio.version": gonio.__version__, "gonio.torch": torch.__version__}
    written = {"gonio.recipe": recipe.to_yaml(), "gonio.recipe_hash": recipe.hash, "gonio.seed": "7"}
    assert metadata("a.safetensors") == {**versions, **written}
    invoke("fold", "a.safetensors", *MODEL, "-o", "b.safetensors", "--where", "fc*")
    assert metadata("b.safetensors") == {**versions, "gonio.folded_recipe_hash": recipe.hash}
    invoke("fold", "b.safetensors", *MODEL, "-o", "c.safetensors")
    assert metadata("c.safetensors")["gonio.folded_recipe_hash"] == recipe.hash


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_recipe_that_was_changed_in_the_file_is_refused(plain: nn.Module, suffix: str) -> None:
    invoke("apply", "normed.yaml", "plain.pt", *MODEL, "-o", "a.pt")
    content = torch.load("a.pt", weights_only=True)
    said = {key: value for key, value in content.items() if key.startswith("gonio.")}
    said["gonio.recipe"] = said["gonio.recipe"].replace("WeightNorm", "SpectralNorm")
    if suffix == ".pt":
        torch.save({**content, **said}, "changed.pt")
    else:
        save_file(content["state_dict"], "changed.safetensors", metadata=said)
    result = invoke("fold", f"changed{suffix}", *MODEL, "-o", "b.pt")
    assert "its recipe 'normed' does not have the hash that the file states" in result.stderr
    assert result.exit_code == 3
    assert not Path("b.pt").exists()


@pytest.mark.parametrize("line", ["fold {} -o new.pt", "apply orthogonal-init {} -o new.pt"])
def test_numbers_that_get_another_dtype_are_named(plain: nn.Module, line: str) -> None:
    save_file({name: value.half() for name, value in plain.state_dict().items()}, "half.safetensors")
    named = "its float16 numbers are written as float32, which the model has"
    for file, said in (("half.safetensors", True), ("plain.safetensors", False)):
        result = invoke(*line.format(file).split(), *MODEL)
        assert result.exit_code == 0
        assert (named in " ".join(result.stderr.split())) == said


def write_for_ever(path: str) -> None:
    for value in itertools.count():
        write(Checkpoint(path, {"weight": torch.full((2_000_000,), float(value))}))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_kill_in_the_middle_leaves_a_whole_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    write(Checkpoint(str(path), {"weight": torch.full((2_000_000,), -1.0)}))
    drafts = 0
    for _ in range(8):
        child = multiprocessing.get_context("fork").Process(target=write_for_ever, args=(str(path),))
        child.start()
        while not list(tmp_path.glob(".*.part")):
            assert child.is_alive()
        child.kill()
        child.join()
        drafts += len(list(tmp_path.glob(".*.part")))
        weight = read(str(path)).state["weight"]
        assert weight.shape == (2_000_000,)
        assert bool((weight == weight[0]).all())
        for draft in tmp_path.glob(".*.part"):
            draft.unlink()
    assert drafts > 0, "no kill came in the middle of writing"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_limit_on_the_size_of_files_keeps_the_old_one(plain: nn.Module, suffix: str) -> None:
    """As on a full disk: the writers of both formats raise errors of their own kinds."""
    target = Path(f"out{suffix}")
    target.write_bytes(b"old")
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, allowed[1]))
        ended = invoke("apply", "normed.yaml", "plain.pt", *MODEL, "-o", str(target))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
        signal.signal(signal.SIGXFSZ, before)
    assert ended.exit_code == 3, ended.stderr
    assert f"out{suffix} could not be written" in ended.stderr
    assert target.read_bytes() == b"old"
    assert not list(Path().glob(".out*"))


def test_a_parametrized_checkpoint_without_its_recipe_says_what_it_holds(plain: nn.Module) -> None:
    gonio.parametrize_(plain, gonio.parametrizations.WeightStandardization())
    torch.save(plain.state_dict(), "ws.pt")
    result = invoke("fold", "ws.pt", *MODEL, "-o", "out.pt")
    assert result.exit_code == 3
    assert "Its weights are parametrized (WeightStandardization): name a factory that parametrizes" in result.stderr
    assert "gonio fold CKPT --recipe RECIPE" in result.stderr
    assert not Path("out.pt").exists()


@pytest.mark.parametrize(
    "line",
    [
        "apply normed.yaml gan.pt --model digits-cnn -o out.pt",
        "fold gan.pt --model digits-cnn -o out.pt --recipe normed.yaml",
        "measure gan.pt --model digits-cnn",
        "doctor gan.pt --model digits-cnn",
        "doctor gan.pt",
    ],
)
def test_every_command_whose_error_advises_a_key_takes_it(plain: nn.Module, line: str) -> None:
    words, folds = line.split(), line.startswith("fold")
    if folds:
        invoke("apply", "normed.yaml", "plain.pt", *MODEL, "-o", "normed.pt")
    one = torch.load("normed.pt")["state_dict"] if folds else plain.state_dict()
    torch.save({"generator": one, "critic": models.digits_cnn().state_dict()}, "gan.pt")
    refused = invoke(*words)
    assert refused.exit_code == 2
    assert "Name the one to measure (--key generator on the command line)" in refused.stderr
    taken = invoke(*words, "--key", "generator")
    assert taken.exit_code == 0, taken.stderr
    if line.startswith("apply"):
        written = torch.load("out.pt")["state_dict"]
        assert torch.equal(written["conv1.weight"], plain.state_dict()["conv1.weight"])
    if not folds:
        alone = invoke(*[word.replace("gan.pt", "plain.safetensors") for word in words], "--key", "generator")
        assert (alone.exit_code, "a key names a state dict in a checkpoint of torch" in alone.stderr) == (2, True)


def test_what_trainers_write_loads_into_its_model(plain: nn.Module) -> None:
    """`model.pth.tar` of data parallel training, Lightning's attribute, and a folder with the model's file."""
    state = plain.state_dict()
    torch.save({"state_dict": {f"net.model.{k}": v for k, v in state.items()}}, "lightning.ckpt")
    parts = {f"{part}.{k}": v for part in ("model", "ema.module") for k, v in state.items()}
    torch.save({"state_dict": {**parts, "loss.weight": torch.ones(3)}}, "parts.ckpt")
    with pytest.raises(NotApplicableError, match=r"names are in it after 'model\.' and 'ema\.module\.'\. Save one"):
        restored_model(read("parts.ckpt"), "digits-cnn")
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}}, "best.pth.tar")
    Path("folder").mkdir()
    save_file(state, "folder/model.safetensors")
    Path("shards").mkdir()
    halves = [dict(list(state.items())[part::2]) for part in (0, 1)]
    for i, half in enumerate(halves, start=1):
        save_file(half, f"shards/model-0000{i}-of-00002.safetensors")
    for source in ("best.pth.tar", "lightning.ckpt", "folder", "shards"):
        restored = restored_model(read(source), "digits-cnn").state_dict()
        assert all(torch.equal(restored[name], tensor) for name, tensor in state.items()), source


def test_a_tied_weight_that_a_file_names_once_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tied.py").write_text(
        "from torch import nn\n\ndef net():\n"
        "    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))\n"
        "    model[1].weight = model[0].weight\n    return model\n"
    )
    save_file({"0.weight": torch.arange(24.0).view(6, 4)}, "tied.safetensors")
    model = restored_model(read("tied.safetensors"), "tied.py:net")
    assert model[1].weight is model[0].weight
    assert model[1].weight[5, 3] == 23
    save_file({"1.bias": torch.zeros(6)}, "other.safetensors")
    with pytest.raises(NotApplicableError, match=r"missing \(0.weight, 1.weight\)"):
        restored_model(read("other.safetensors"), "tied.py:net")


def test_a_folded_checkpoint_is_told_from_one_of_another_model(plain: nn.Module) -> None:
    write(
        Checkpoint("folded.safetensors", {"conv1.weight": torch.ones(1), "conv1.bias": torch.ones(1)}, folded="0" * 64)
    )
    with pytest.raises(
        NotApplicableError, match=r"21 missing .*; 1 unknown \(conv1\.bias\); 1 of another shape.*were folded"
    ):
        restored_model(read("folded.safetensors"), "digits-cnn")


def test_a_pipe_and_a_quoted_home_are_no_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file({"w": torch.ones(2)}, tmp_path / "own.safetensors")
    os.mkfifo(tmp_path / "pipe.pt")
    for command in ("check", "measure"):
        refused = invoke(command, "~/own.safetensors")
        assert refused.exit_code == 3
        assert f"Write {tmp_path / 'own.safetensors'}." in " ".join(refused.stderr.split())
        assert "it is a pipe or a device. Copy its content" in invoke(command, str(tmp_path / "pipe.pt")).stderr
