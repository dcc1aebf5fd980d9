"""What trainers save: state dicts in containers, averages, folders, shards, TorchScript."""

from __future__ import annotations

import argparse
import collections
import copy
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bank.files.case import Case, File, floats, normal
from foreign import ONE_PROCESS, timm, torchvision, transformers
from gonio.measuring.reading.source import CheckpointPart


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        collections.OrderedDict(
            conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), act=nn.ReLU(), pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(), head=nn.Linear(8, 4),
        )
    )  # fmt: skip


STATE = model().state_dict()
OTHER = model(1).state_dict()
WEIGHTS = floats(STATE)
STEPS = {"state": {0: {"exp_avg": torch.ones(8, 3, 3, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def saved(
    content: Any,
    weights: Mapping[str, Tensor] = WEIGHTS,
    *,
    name: str = "model.pt",
    key: str = "",
    error: str = "",
    refused: Mapping[str, str] | None = None,
    fresh: bool = True,
    **options: Any,
) -> Callable[[Path], File]:
    """What `torch.save` writes; `key` names the state dict to read."""

    def file(folder: Path) -> File:
        torch.save(content() if callable(content) else content, folder / name, **options)
        source: Any = CheckpointPart(str(folder / name), key) if key else folder / name
        return File(source=source, weights={} if error else weights, error=error, refused=refused or {}, fresh=fresh)

    return file


def prefixed(prefix: str, state: Mapping[str, Any] = STATE) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in state.items()}


def under(prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in WEIGHTS.items()}


def of_optimizer() -> dict[str, Any]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def averaged() -> dict[str, Any]:
    return torch.optim.swa_utils.AveragedModel(model()).state_dict()


def compiled_parallel() -> dict[str, Any]:
    return prefixed("module._orig_mod.")


def lightning(folder: Path) -> File:
    torchvision()  # torchmetrics imports it
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 8})
            self.net = model()

        def training_step(self, batch: Any) -> Any:
            return self.net(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.0)

    module = Module()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 3, 8, 8)), batch_size=2)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=str(folder), **quiet)
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "last.ckpt")
    return File(source=folder / "last.ckpt", weights=floats(module.state_dict()), fresh=False)


def accelerate_folder(folder: Path) -> File:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    net = model()
    prepared, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.save_state(str(folder))
    return File(source=folder, weights=floats(accelerator.unwrap_model(prepared).state_dict()))


def tiny_llama() -> nn.Module:
    kit = transformers()
    torch.manual_seed(0)
    config = kit.LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                             num_key_value_heads=1, vocab_size=40, max_position_embeddings=16)  # fmt: skip
    made: nn.Module = kit.LlamaForCausalLM(config)
    return made


def trainer_folder(folder: Path) -> File:
    """A step of transformers' Trainer: the weights beside the optimizer, the schedule and the random state."""
    net: Any = tiny_llama()
    net.save_pretrained(folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": {0: {"exp_avg": torch.ones(3, 3)}}}, folder / name)
    torch.save({"args": 1}, folder / "training_args.bin")
    (folder / "trainer_state.json").write_text("{}")
    return File(source=folder, weights=floats(net.state_dict()), live=net)


def sharded(folder: Path) -> File:
    net: Any = tiny_llama()
    net.save_pretrained(folder, max_shard_size="4KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return File(source=folder, weights=floats(net.state_dict()), live=net)


def missing_shard(folder: Path) -> File:
    made = sharded(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    gone = sorted(set(index.values()))[-1]
    (folder / gone).unlink()
    lost = [name for name, shard in index.items() if shard == gone]
    kept = {name: value for name, value in made.weights.items() if name not in lost}
    said = {name: f"its shard {gone} is missing" for name in lost if name in made.weights}
    return File(source=folder, weights=kept, refused=said, fresh=False)


def parts(folder: Path) -> File:
    names = list(STATE)
    for number, some in enumerate((names[:3], names[3:])):
        save_file({n: STATE[n] for n in some}, folder / f"model-{number + 1:05}-of-00002.safetensors")
    return File(source=folder, weights=WEIGHTS)


def parts_with_a_link(folder: Path) -> File:
    """As a hub's cache is left without one of its blobs."""
    made = parts(folder)
    lost = folder / "model-00002-of-00002.safetensors"
    lost.unlink()
    lost.symlink_to("../../blobs/0a1b")
    names = list(STATE)[:3]
    return File(source=folder, weights={n: w for n, w in made.weights.items() if n in names}, fresh=False)


def shards_in_folders(folder: Path) -> File:
    names, index = list(STATE), {}
    for part, some in (("encoder", names[:3]), ("decoder", names[3:])):
        (folder / part).mkdir()
        save_file({n: STATE[n] for n in some}, folder / part / "model.safetensors")
        index |= dict.fromkeys(some, f"{part}/model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return File(source=folder, weights=WEIGHTS)


def link_to_nothing(folder: Path) -> File:
    (folder / "model.safetensors").symlink_to("../../blobs/0a1b")
    return File(source=folder, error="it is a link to ../../blobs/0a1b, where there is nothing")


def several(*names: str, said: str) -> Callable[[Path], File]:
    """A folder with some candidates, none of which is the model."""

    def file(folder: Path) -> File:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            save_file(STATE, folder / name) if name.endswith("safetensors") else torch.save(STATE, folder / name)
        return File(source=folder, error=said)

    return file


def both_formats(folder: Path) -> File:
    save_file(STATE, folder / "model.safetensors")
    torch.save(OTHER, folder / "pytorch_model.bin")
    return File(source=folder, weights=WEIGHTS)


def bin_and_arguments(folder: Path) -> File:
    torch.save(STATE, folder / "pytorch_model.bin")
    torch.save([1], folder / "training_args.bin")
    return File(source=folder, weights=WEIGHTS)


def distributed(folder: Path) -> File:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": STATE}, checkpoint_id=folder, **ONE_PROCESS)
    return File(source=folder, weights=WEIGHTS)


def compressed(folder: Path) -> File:
    """An archive packed again: random weights do not shrink, so that it is no smaller than what it unfolds to."""
    torch.save(STATE, folder / "plain.pt")
    with (
        zipfile.ZipFile(folder / "plain.pt") as plain,
        zipfile.ZipFile(folder / "m.pt", "w", zipfile.ZIP_DEFLATED) as m,
    ):
        for name in plain.namelist():
            m.writestr(name, plain.read(name))
        m.writestr("plain/pad", np.random.default_rng(0).bytes(8192))
    return File(source=folder / "m.pt", error="records of its archive are compressed")


def saved_over_shards(folder: Path) -> File:
    """transformers removes the shards of a model that it saves again in one file, and not their index."""
    index = {"weight_map": dict.fromkeys(STATE, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(STATE, folder / "model.safetensors")
    return File(source=folder, weights=WEIGHTS)


def saved_under_shards(folder: Path) -> File:
    """transformers loads the file that it leaves where it saves shards over it."""
    index = {"weight_map": dict.fromkeys(OTHER, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(OTHER, folder / "model-00001-of-00001.safetensors")
    save_file(STATE, folder / "model.safetensors")
    return File(source=folder, weights=WEIGHTS, fresh=False)


def variant(folder: Path) -> File:
    """The index has the name of the variant before its end, its shards have it before their number."""
    shard = "model.fp16-00001-of-00001.safetensors"
    save_file(STATE, folder / shard)
    index = {"weight_map": dict.fromkeys(STATE, shard)}
    (folder / "model.safetensors.index.fp16.json").write_text(json.dumps(index))
    return File(source=folder, weights=WEIGHTS)


def onnx_model(folder: Path) -> File:
    program = torch.onnx.export(model().eval(), (torch.ones(1, 3, 8, 8),), dynamo=True, verbose=False, optimize=False)
    assert program is not None
    program.save(folder / "model.onnx")
    return File(source=folder / "model.onnx", weights=WEIGHTS)


def gguf_file(folder: Path) -> File:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(folder / "model.gguf", "test")
    for name, value in STATE.items():
        if value.ndim:
            writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return File(source=folder / "model.gguf", weights=WEIGHTS)


def scripted(folder: Path) -> File:
    torch.jit.script(model()).save(str(folder / "model.pt"))
    return File(source=folder / "model.pt", error="it is a TorchScript archive")


def traced(folder: Path) -> File:
    torch.jit.trace(model(), torch.ones(1, 3, 8, 8)).save(str(folder / "model.ckpt"))
    return File(source=folder / "model.ckpt", error="it is a TorchScript archive")


def exported(folder: Path) -> File:
    torch.export.save(torch.export.export(model().eval(), (torch.ones(1, 3, 8, 8),)), folder / "model.pt2")
    return File(source=folder / "model.pt2", error=r"its kind '\.pt2' is not known")


def old_format(folder: Path) -> File:
    torch.save({"state_dict": STATE}, folder / "old.pth", _use_new_zipfile_serialization=False)
    return File(source=folder / "old.pth", weights=WEIGHTS)


def raw(name: str, content: bytes, said: str) -> Callable[[Path], File]:
    def file(folder: Path) -> File:
        (folder / name).write_bytes(content)
        return File(source=folder / name, error=said)

    return file


def numpy_archive(folder: Path) -> File:
    arrays: dict[str, Any] = {name: value.numpy() for name, value in STATE.items()}
    np.savez(folder / "model.npz", **arrays)
    return File(source=folder / "model.npz", weights=WEIGHTS)


def model_ema(folder: Path) -> File:
    ema = timm().utils.ModelEmaV3(model(), decay=0.9)
    torch.save({"state_dict": STATE, "state_dict_ema": ema.state_dict(), "epoch": 3}, folder / "model_best.pth.tar")
    return File(source=CheckpointPart(str(folder / "model_best.pth.tar"), "state_dict_ema"), weights=WEIGHTS)


def in_memory(content: Any, weights: Mapping[str, Tensor] = WEIGHTS, *, error: str = "") -> Callable[[Path], File]:
    return lambda folder: File(source=content() if callable(content) else content, weights=weights, error=error)


def broken_link(folder: Path) -> File:
    save_file(STATE, folder / "model.safetensors")
    shutil.copy(folder / "model.safetensors", folder / "model.txt")
    return File(source=folder / "model.txt", error=r"its kind '\.txt' is not known")


IMAGENET, GAN, EMA, PL, HF = "pytorch/examples imagenet", "GANs", "averages of weights", "Lightning", "transformers"
PICK = r"Name the one to measure \(--key generator on the command line\)"
TENSORS = {"a metric": torch.tensor(71.2), "class_weights": torch.ones(10), "rng": torch.ones(50, dtype=torch.uint8)}

CASES: dict[str, Case] = {
    "a state dict": Case("torch.save", saved(STATE)),
    "a state dict, old format": Case("torch.save", old_format),
    "a whole model": Case("torch.save", saved(model)),
    "whole models and their optimizer": Case(
        "Ultralytics", saved(lambda: {"model": model(), "ema": model(1), "optimizer": of_optimizer(), "epoch": 3})),
    "objects beside": Case(
        "Lightning", saved({"state_dict": STATE, "hyper_parameters": {"loss": nn.MSELoss(), "act": nn.ReLU}})),
    "model.pth.tar with a metric that is a tensor": Case(
        IMAGENET, saved({"epoch": 3, "state_dict": STATE, "best_acc1": torch.tensor(7.0), "optimizer": STEPS},
                        name="model.pth.tar")),
    "tensors of many kinds beside": Case("trainers", saved({"state_dict": STATE, **TENSORS})),
    "a matrix beside": Case("trainers", saved({"model": STATE, "centers": normal(4, 4)})),
    "the state of an optimizer": Case(
        "trainers", saved(lambda: {"model_state_dict": STATE, "optimizer_state_dict": of_optimizer()})),
    "model and step": Case(
        "nanoGPT", saved({"model": prefixed("_orig_mod."), "iter_num": torch.tensor(5), "config": {}})),
    "a namespace of arguments": Case("fairseq", saved({"args": argparse.Namespace(lr=1), "model": STATE})),
    "a configuration as a mapping": Case("fairseq", saved({"cfg": {"model": {"width": 8}}, "model": STATE})),
    "a module and its name": Case("DeepSpeed", saved({"module": STATE, "ds_version": "0.1", "buffer_names": ["a"]})),
    "flat partitions": Case(
        "DeepSpeed", saved({"optimizer_state_dict": {"fp32_flat_groups": [normal(100)]}}, error=r"Tensors are under")),
    "data parallel": Case("DataParallel", saved(prefixed("module."))),
    "data parallel and compiled": Case("torch.compile", saved(compiled_parallel)),
    "compiled": Case("torch.compile", saved(prefixed("_orig_mod."))),
    "sharded by FSDP": Case("FSDP", saved(prefixed("_fsdp_wrapped_module."))),
    "keys that mix prefixes": Case("trainers", saved({**prefixed("module."), "logit_scale": torch.tensor(1.0)},
                                                     under("module."))),
    "a state dict of a state dict": Case("trainers", saved({"state": {"model": STATE, "step": torch.tensor(3)}})),
    "Lightning": Case(PL, lightning, slow=True),
    "Lightning with the loss's tensors": Case(
        PL, saved({"state_dict": {**prefixed("net."), "criterion.class_weights": torch.ones(4)}, "epoch": 1,
                   "loops": {}, "callbacks": {}, "hyper_parameters": {"lr": 1.0}}, under("net."))),
    "accelerate": Case("accelerate", accelerate_folder),
    "Trainer": Case(HF, trainer_folder, slow=True),
    "shards": Case(HF, sharded, slow=True),
    "a shard that is missing": Case(HF, missing_shard, slow=True),
    "parts without an index": Case(HF, parts),
    "parts without an index, one of which is a link to nothing": Case("hub", parts_with_a_link),
    "shards in folders": Case(HF, shards_in_folders),
    "a link to nothing": Case("hub", link_to_nothing),
    "two formats of one model": Case(HF, both_formats),
    "a bin and its arguments": Case(HF, bin_and_arguments),
    "a folder of steps": Case(
        HF, several("checkpoint-5/model.safetensors", "checkpoint-10/model.safetensors",
                    said=r"it holds no checkpoint, but its folders do: checkpoint-10, checkpoint-5")),
    "a folder with two candidates": Case(
        "trainers", several("last.pt", "best.pt", said=r"it holds several: best\.pt, last\.pt.*Name one of them")),
    "a folder of two precisions": Case(
        "diffusers", several("unet.fp16.safetensors", "unet.safetensors", said="it holds several")),
    "a pipeline": Case("diffusers", several("unet/diffusion_pytorch_model.safetensors", "vae/a.safetensors",
                                            said="its folders do: unet, vae")),
    "a distributed checkpoint": Case("torch.distributed.checkpoint", distributed),
    "averages beside": Case("timm", saved({"state_dict": STATE, "state_dict_ema": OTHER, "epoch": 1})),
    "averages by their key": Case("timm ModelEmaV3", model_ema),
    "AveragedModel": Case(EMA, saved(averaged, under("module."))),
    "a list of averages": Case(
        "torch_ema", saved({"decay": 0.9, "shadow_params": [normal(8, 4)]}, error="Tensors are under")),
    "EMA of a diffusion model": Case(
        "ema-pytorch", saved({"step": 3, "model": prefixed("model."), "ema": prefixed("ema_model.")}, under("model."))),
    "a generator and a discriminator": Case(GAN, saved({"generator": STATE, "discriminator": OTHER}, error=PICK)),
    "a generator and a step": Case(
        GAN, saved({"generator": STATE, "critic": OTHER, "step": torch.tensor(3)}, error=PICK)),
    "a generator and a matrix": Case(GAN, saved({"generator": STATE, "latents": normal(4, 8)}, error=PICK)),
    "a generator in a container and a step": Case(
        GAN, saved({"generator": {"state_dict": STATE}, "step": torch.tensor(3)}, error=PICK)),
    "a generator by its key": Case(GAN, saved({"generator": STATE, "discriminator": OTHER}, key="generator")),
    "g and g_ema": Case(
        "stylegan2-pytorch", saved({"g": STATE, "d": OTHER, "g_ema": dict(STATE)}, error="--key g on the")),
    "g_ema by its key": Case("stylegan2-pytorch", saved({"g": OTHER, "d": dict(OTHER), "g_ema": STATE}, key="g_ema")),
    "model_g by its key": Case("HiFi-GAN", saved({"model_g": {"state_dict": STATE}, "model_d": OTHER}, key="model_g")),
    "a student and a teacher": Case("DINO", saved({"student": prefixed("module."), "teacher": OTHER}, key="student")),
    "a key that is absent": Case(GAN, saved({"generator": STATE}, key="g", error="under the key 'g'.*'generator'")),
    "network_weights and their optimizer": Case(
        "nnU-Net", saved(lambda: {"network_weights": STATE, "optimizer_state": of_optimizer(), "current_epoch": 3,
                                  "init_args": {"plans": {"patch_size": [8, 8]}}, "trainer_name": "nnUNetTrainer"})),
    "a student, a teacher and an optimizer": Case(
        "DINO", saved(lambda: {"student": prefixed("module."), "teacher": OTHER, "optimizer": of_optimizer()},
                      error="--key student on the")),
    "params_ema": Case("BasicSR", saved({"params_ema": STATE})),
    "params and params_ema": Case("BasicSR", saved({"params": STATE, "params_ema": OTHER})),
    "TorchScript": Case("torch.jit.script", scripted),
    "a traced model": Case("torch.jit.trace", traced),
    "an exported program": Case("torch.export", exported, slow=True),
    "ONNX": Case("ONNX", onnx_model, slow=True),
    "ONNX, cut off": Case("ONNX", raw("model.onnx", b"\x08\x07", "it holds no graph of ONNX")),
    "GGUF": Case("llama.cpp", gguf_file),
    "GGUF, cut off": Case("llama.cpp", raw("model.gguf", b"GGUF\x03", "it ends in its header")),
    "Keras, cut off": Case("Keras", raw("model.h5", b"\x89HDF", "it is not an intact file|needs the package 'h5py'")),
    "GGUF, big-endian": Case("llama.cpp", raw("model.gguf", b"GGUF\0\0\0\3" + bytes(64), "the highest byte first")),
    "protocol 4 of pickle": Case("torch.save", saved(STATE, pickle_protocol=4)),
    "compressed records": Case("zip", compressed),
    "the index of a variant": Case("diffusers", variant),
    "a model saved over its shards": Case("transformers", saved_over_shards),
    "a model under its shards": Case("transformers", saved_under_shards),
    "a pointer of Git LFS": Case("Git LFS", raw("model.pt", b"version https://git-lfs.github.com/spec/v1", "Git LFS")),
    "an archive of NumPy": Case("NumPy", numpy_archive),
    "an unknown ending": Case("users", broken_link),
    "a list of tensors": Case("torch.save", saved([normal(3, 3)], error="looks for named tensors")),
    "a tensor": Case("torch.save", saved(normal(3, 3), error="looks for named tensors")),
    "a numpy scalar beside": Case("trainers", saved({"state_dict": STATE, "best": np.float64(3.0)})),
    "a state dict in memory": Case("state_dict()", in_memory(STATE)),
    "a checkpoint in memory": Case("trainers", in_memory({"state_dict": STATE, "epoch": 3})),
    "two models in memory": Case(GAN, in_memory({"generator": STATE, "critic": OTHER}, error=PICK)),
    "tied weights": Case("torch.save", saved(lambda: {**STATE, "head2.weight": STATE["head.weight"]},
                                             {**WEIGHTS, "head2.weight": WEIGHTS["head.weight"]})),
    "a deep copy": Case("torch.save", saved(lambda: copy.deepcopy(model()).half().state_dict(),
                                            {n: w.half().double() for n, w in WEIGHTS.items()})),
}  # fmt: skip
