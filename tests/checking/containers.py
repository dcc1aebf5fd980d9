"""One set of weights in every format that `check` reads, written by the field's own writers."""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from foreign import ONE_PROCESS

State = dict[str, Tensor]
LAYERS, RANKS = 6, 2
VICTIM, OTHER = "layers.2.down.weight", "layers.4.down.weight"


def weights(seed: int, dtype: torch.dtype = torch.float32) -> State:
    """Matrices of two shapes in six layers and a vector, as a model has them."""
    draw, made = torch.Generator().manual_seed(seed), State()
    for layer in range(LAYERS):
        made[f"layers.{layer}.down.weight"] = torch.randn(24, 40, generator=draw) / 6
        made[f"layers.{layer}.up.weight"] = torch.randn(40, 24, generator=draw) / 6
    made["norm.bias"] = torch.randn(40, generator=draw)
    return {name: value.to(dtype) for name, value in made.items()}


def plain(state: Mapping[str, Tensor]) -> State:
    return {name: value.clone().contiguous() for name, value in state.items()}


def safetensors(state: State, folder: Path) -> Path:
    save_file(plain(state), folder / "model.safetensors")
    return folder / "model.safetensors"


def sharded(state: State, folder: Path) -> Path:
    """Two shards and their index, as `save_pretrained` writes them."""
    names, held = list(state), {}
    for number in range(2):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        part = {name: state[name] for name in names[number * 7 : (number + 1) * 7]}
        save_file(plain(part), folder / file)
        held |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {"total_size": sum(v.nbytes for v in state.values())}, "weight_map": held})
    )
    return index


def torch_bin(state: State, folder: Path) -> Path:
    torch.save(plain(state), folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def trainer(state: State, folder: Path) -> Path:
    moments = {i: {"exp_avg": torch.full_like(value, 0.01)} for i, value in enumerate(state.values())}
    content = {"model": plain(state), "optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}, "epoch": 3}
    torch.save(content, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def distributed(state: State, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({"model": plain(state)}, checkpoint_id=folder / "dcp", **ONE_PROCESS)
    return folder / "dcp"


def zero(state: State, folder: Path) -> Path:
    """Stage 2 of DeepSpeed: each rank has half of the flat float32 weights."""
    (folder / "zero").mkdir()
    flat = torch.cat([value.float().flatten() for value in state.values()])
    parts = torch.cat([flat, torch.zeros(-len(flat) % (2 * RANKS))]).chunk(RANKS)
    for rank, part in enumerate(parts):
        held = {"zero_stage": 2, "partition_count": [RANKS], "single_partition_of_fp32_groups": [part.clone()]}
        held |= {"base_optimizer_state": [{"exp_avg": torch.full_like(part, 0.01)}], "ds_version": "0.18.2"}
        file = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": held, "ds_config": {}}, folder / "zero" / file)
    shapes = [OrderedDict((name, value.shape) for name, value in state.items())]
    model: dict[str, Any] = {"module": {name: value.bfloat16() for name, value in state.items()}, "buffer_names": []}
    model |= {"param_shapes": shapes, "shared_params": {}, "frozen_param_shapes": None, "ds_version": "0.18.2"}
    torch.save(model | {"frozen_param_fragments": None}, folder / "zero" / "mp_rank_00_model_states.pt")
    return folder / "zero"


def gguf(state: State, folder: Path) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(folder / "model.gguf", "llama")
    for name, value in state.items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


def npz(state: State, folder: Path) -> Path:
    np.savez(folder / "model.npz", **{name: value.numpy() for name, value in state.items()})
    return folder / "model.npz"


def hdf5(state: State, folder: Path) -> Path:
    import h5py

    with h5py.File(folder / "model.h5", "w") as file:
        for name, value in state.items():
            options = {"fletcher32": True, "chunks": tuple(value.shape)} if value.ndim else {}
            file.create_dataset(name, data=value.numpy(), **options)
    return folder / "model.h5"


def flax(state: State, folder: Path) -> Path:
    """As `flax.serialization.msgpack_serialize` writes it."""
    import msgpack

    def packed(value: Tensor) -> Any:
        name = str(value.dtype).removeprefix("torch.")
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return msgpack.ExtType(1, msgpack.packb((tuple(value.shape), name, raw), use_bin_type=True))

    tree = {"params": dict(state.items())}
    (folder / "model.msgpack").write_bytes(msgpack.packb(tree, default=packed, strict_types=True))
    return folder / "model.msgpack"


def onnx(state: State, folder: Path) -> Path:
    import onnx as package

    helper = package.helper
    tensors = [package.numpy_helper.from_array(value.contiguous().numpy(), name) for name, value in state.items()]
    nodes = [
        helper.make_node("Gemm", ["x", name], [f"y.{name}"], transB=1)
        if state[name].ndim == 2
        else helper.make_node("Add", ["x", name], [f"y.{name}"])
        for name in state
    ]
    ends = [helper.make_tensor_value_info(name, package.TensorProto.FLOAT, None) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    package.save(helper.make_model(graph), folder / "model.onnx")
    return folder / "model.onnx"


def _quantised(state: State, folder: Path, about: dict[str, Any], part: Callable[[str, Tensor], State]) -> Path:
    """A safetensors file whose matrices are packed; codes are those of rounding to 4 bits."""
    made = State()
    for name, value in state.items():
        made |= part(name.removesuffix("weight"), value) if value.ndim == 2 else {name: value}
    save_file(plain(made), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": about}))
    return folder / "model.safetensors"


def _codes(value: Tensor) -> tuple[Tensor, Tensor]:
    """Eight codes of 4 bits in each int32, and the scale of each group of eight entries."""
    groups = value.float().unflatten(1, (-1, 8))
    scale = groups.abs().amax(2) / 7
    codes = (groups / scale[..., None]).round().nan_to_num().long().clamp(-8, 7) + 8
    packed = (codes << (4 * torch.arange(8))).sum(2)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int(), scale


def compressed(state: State, folder: Path) -> Path:
    about = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 8, "strategy": "group", "symmetric": True,
                                           "type": "int"}}}}  # fmt: skip

    def part(name: str, value: Tensor) -> State:
        codes, scale = _codes(value)
        return {f"{name}weight_packed": codes, f"{name}weight_scale": scale,
                f"{name}weight_shape": torch.tensor(value.shape)}  # fmt: skip

    return _quantised(state, folder, about, part)


def gptq(state: State, folder: Path) -> Path:
    def part(name: str, value: Tensor) -> State:
        codes, scale = _codes(value.T)
        groups = torch.arange(value.shape[1], dtype=torch.int32) // 8
        zeros = torch.full((value.shape[1] // 8, value.shape[0] // 8), 0x77777777, dtype=torch.int32)
        scales = value.float().T.unflatten(0, (-1, 8)).abs().amax(1) / 7
        assert scale.numel() == scales.numel()
        return {f"{name}qweight": codes.reshape(-1, value.shape[0]), f"{name}qzeros": zeros, f"{name}scales": scales,
                f"{name}g_idx": groups}  # fmt: skip

    return _quantised(state, folder, {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False}, part)


FORMATS: dict[str, Callable[[State, Path], Path]] = {
    "safetensors": safetensors,
    "shards with an index": sharded,
    "torch state dict": torch_bin,
    "torch checkpoint": trainer,
    "torch.distributed": distributed,
    "ZeRO": zero,
    "GGUF": gguf,
    "NumPy": npz,
    "HDF5": hdf5,
    "Flax": flax,
    "ONNX": onnx,
    "compressed-tensors": compressed,
    "GPTQ": gptq,
}
NEEDS = {"GGUF": "gguf", "HDF5": "h5py", "Flax": "msgpack", "ONNX": "onnx"}
PACKED = ("compressed-tensors", "GPTQ")
HEADED = ("safetensors", "shards with an index", *PACKED)  # whose files are of safetensors


def data_file(source: Path) -> Path:
    """The file of a source that holds the first half of its values, or all."""
    if source.is_dir():
        return max(source.glob("*.distcp"), default=None, key=lambda f: f.stat().st_size) or min(source.glob("*optim*"))
    return min(source.parent.glob("*.safetensors")) if source.suffix == ".json" else source
