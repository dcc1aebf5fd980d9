"""Quantised weights as each tool packs them, and what they stand for; those that are not read are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bank.files import packings as pack
from bank.files.case import Case, File, normal, stored

Config = Mapping[str, Any]
NAMES = ("w.weight", "w.qweight", "w.weight_packed", "w_blocks")  # under which a packed weight can be refused


def packed(make: Callable[[], pack.Packed], *, refused: str = "", beside: str = "config.json", **config: Any) -> Any:
    """A weight in a stored format.

    Args:
        refused: why it is not read. `beside`: the file with its configuration. `config`: changes of that.
    """

    def file(folder: Path) -> File:
        state, values, about = make()
        about = {**about, **config}
        stored(folder, state)
        content = {"quantization_config": about} if beside == "config.json" else about
        (folder / beside).write_text(json.dumps(content))
        name = "w" if "w_blocks" in state else "w.weight"
        if refused:
            return File(source=folder, refused={name: refused}, fresh=False)
        return File(source=folder, weights={name: torch.tensor(np.array(values)).double()}, fresh=False)

    return file


# --- 8 bits ----------------------------------------------------------------------------------------------------------

W = normal(256, 192) * 0.02


def scaled(key: str, shape: tuple[int, ...], **config: Any) -> Callable[[Path], File]:
    """8-bit floats and their scale under a key: one, or one for each block."""

    def file(folder: Path) -> File:
        grown = [*shape, *[1] * (W.ndim - len(shape))]
        cut = W.reshape(grown[0], 256 // grown[0], grown[1], 192 // grown[1])
        scale = cut.abs().amax((1, 3), keepdim=True) / 448
        codes = (cut / scale).to(torch.float8_e4m3fn)
        state = {"l.weight": codes.reshape(W.shape), key: scale.reshape(shape), "l.bias": torch.zeros(256)}
        state["l.input_scale"] = torch.ones(1)
        weight = (codes.double() * scale.double()).reshape(W.shape)
        return File(source=stored(folder, state, {"quantization_config": config}), weights={"l.weight": weight})

    return file


def blocks_of_64(folder: Path) -> File:
    codes, scale = normal(100, 200).to(torch.float8_e4m3fn), torch.rand(2, 4) + 0.5
    rows, columns = torch.arange(100) // 64, torch.arange(200) // 64
    about = {"quant_method": "fp8", "weight_block_size": [64, 64], "scale_fmt": "ue8m0"}
    source = stored(folder, {"l.weight": codes, "l.weight_scale_inv": scale}, {"quantization_config": about})
    return File(source=source, weights={"l.weight": codes.double() * scale[rows][:, columns]})


def other_blocks(about: Config, said: str) -> Callable[[Path], File]:
    def file(folder: Path) -> File:
        state = {"l.weight": normal(100, 200).to(torch.float8_e4m3fn), "l.weight_scale_inv": torch.rand(2, 4)}
        return File(source=stored(folder, state, {"quantization_config": about}), refused={"l.weight": said})

    return file


def mxfp8(folder: Path) -> File:
    powers = torch.arange(118, 118 + 6, dtype=torch.uint8).repeat(256, 1)
    codes = normal(256, 192).to(torch.float8_e4m3fn)
    weight = codes.double() * torch.exp2(powers.double() - 127).repeat_interleave(32, 1)
    return File(source=stored(folder, {"l.weight": codes, "l.weight_scale": powers}), weights={"l.weight": weight})


def experts(shape: tuple[int, ...]) -> Callable[[Path], File]:
    def file(folder: Path) -> File:
        codes, scale = normal(3, 16, 8).to(torch.float8_e4m3fn), torch.tensor([1.0, 2.0, 4.0])
        source = stored(folder, {"l.weight": codes, "l.weight_scale": scale.reshape(shape)})
        return File(source=source, weights={"l.weight": codes.double() * scale[:, None, None]})

    return file


def int8_rows(key: str, shape: tuple[int, ...]) -> Callable[[Path], File]:
    def file(folder: Path) -> File:
        codes, scale = (30 * normal(32, 64)).clamp(-127, 127).to(torch.int8), torch.rand(32) + 0.5
        weight = codes.double() * scale[:, None].double()
        return File(source=stored(folder, {"l.weight": codes, key: scale.reshape(shape)}), weights={"l.weight": weight})

    return file


def int8_with_zeros(shape: tuple[int, int], key: str = "l.weight_zero_point", said: str = "") -> Callable[[Path], File]:
    """Asymmetric codes: a scale and a zero point for each block, as compressed-tensors writes them."""

    def file(folder: Path) -> File:
        cut = (W + 0.01).reshape(shape[0], 256 // shape[0], shape[1], 192 // shape[1])
        least, most = cut.amin((1, 3), keepdim=True), cut.amax((1, 3), keepdim=True)
        scale = (most - least) / 255
        zero = (-128 - least / scale).round()
        codes = ((cut / scale).round() + zero).clamp(-128, 127)
        state = {"l.weight": codes.reshape(W.shape).to(torch.int8), "l.weight_scale": scale.reshape(shape)}
        state |= {key: zero.reshape(shape).to(torch.int8), "l.bias": torch.zeros(256), "l.input_scale": torch.ones(1)}
        weight = ((codes - zero).double() * scale.double()).reshape(W.shape)
        if said:
            return File(source=stored(folder, state), refused={"l.weight": said}, fresh=False)
        return File(source=stored(folder, state), weights={"l.weight": weight}, fresh=False)

    return file


def one_zero(folder: Path) -> File:
    codes = (W / 0.001).to(torch.float8_e4m3fn)
    state = {"l.weight": codes, "l.weight_scale": torch.tensor(0.001), "l.weight_zero_point": torch.zeros(1)}
    return File(source=stored(folder, state), weights={"l.weight": codes.double() * 0.001})


def refused(state: Mapping[str, Tensor], said: Mapping[str, str], config: Config | None = None) -> Any:
    """Tensors of which those in `said` are not read."""
    return lambda folder: File(source=stored(folder, state, config), refused=said, fresh=False)


def codes(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)


def left(parts: Callable[[], Mapping[str, Tensor]], said: str, **config: Any) -> Callable[[Path], File]:
    """A layer `w` of a quantisation that is not read, a plain layer, and one with positions beside its weight."""

    def file(folder: Path) -> File:
        plain = {"rest.weight": normal(8, 6), "at.weight": normal(8, 6, seed=1)}
        state = {**{f"w.{name}": value for name, value in parts().items()}, "w.bias": torch.zeros(64), **plain}
        state["at.position_ids"] = torch.arange(8, dtype=torch.int32)
        source = stored(folder, state, {"quantization_config": config})
        weights = {name: value.double() for name, value in plain.items()}
        return File(source=source, weights=weights, refused={"w.weight": said}, fresh=False)

    return file


def alone(folder: Path) -> File:
    codes = W.to(torch.float8_e5m2)
    return File(source=stored(folder, {"l.weight": codes}), weights={"l.weight": codes.double()}, fresh=False)


# --- tensor subclasses, whose parts are stored --------------------------------------------------------------------


def parts_of_torchao(shape: tuple[int, int], zeros: torch.dtype | None, said: str = "", **config: Any) -> Any:
    """As torchao 0.18 writes `Int8Tensor`, `IntxUnpackedToInt8Tensor` and `Float8Tensor` into safetensors.

    Args:
        zeros: the dtype of zero points; none for 8-bit floats.
    """

    def file(folder: Path) -> File:
        scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
        codes = (2 * normal(32, 192)).clamp(-8, 7).round() if zeros else 30 * normal(32, 192)
        codes = codes.to(torch.int8 if zeros else torch.float8_e4m3fn)
        state = {"l._weight_qdata": codes, "l._weight_scale": scale, "l.bias": torch.zeros(32)}
        shift = torch.arange(scale.numel()).reshape(shape) % 3
        if zeros:
            state["l._weight_zero_point"] = shift.to(zeros)
        source = stored(folder, state, {"quantization_config": config})
        if said:
            return File(source=source, refused={"l._weight_qdata": said}, fresh=False)
        spread = [part.double().repeat_interleave(192 // shape[1], 1) for part in (scale, shift)]
        weight = (codes.double() - spread[1] * bool(zeros)) * spread[0]
        return File(source=source, weights={"l.weight": weight}, fresh=False)

    return file


def parts_of_quanto(dtype: torch.dtype) -> Callable[[Path], File]:
    """As optimum-quanto 0.2.7 writes a weight of 8 bits, in `state_dict()`."""

    def file(folder: Path) -> File:
        codes, scale = (30 * normal(32, 64)).clamp(-127, 127).to(dtype), torch.rand(32, 1) + 0.5
        state = {"l.weight._data": codes, "l.weight._scale": scale, "l.bias": torch.zeros(32)}
        state |= {"l.input_scale": torch.tensor(1.0), "l.output_scale": torch.tensor(1.0)}
        return File(source=stored(folder, state), weights={"l.weight": codes.double() * scale.double()}, fresh=False)

    return file


def seven_in_words_of_four(folder: Path) -> File:
    """Codes of 7 bits, four to a word, which have the shape of 8 bits."""
    state, _, _ = pack.packed_integers(8, 1)
    about = pack.compressed(num_bits=7, type="int", symmetric=True, strategy="channel")
    source = stored(folder, state, {"quantization_config": about})
    return File(source=source, refused={"w.weight_packed": SAID}, fresh=False)


# --- MLX --------------------------------------------------------------------------------------------------------------


def mlx(make: pack.Packed, *, refused: str = "", key: str = "quantization", **config: Any) -> Callable[[Path], File]:
    """A weight of MLX; `config`: changes of its settings, among them those of one layer."""

    def file(folder: Path) -> File:
        state, values, about = make
        source = stored(folder, state, {key: {**about, **config}})
        if refused:
            return File(source=source, refused={"w.weight": refused}, fresh=False)
        return File(source=source, weights={"w.weight": torch.tensor(values)}, fresh=False)

    return file


# --- torch's own -----------------------------------------------------------------------------------------------------


def _static() -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 8), nn.Conv2d(3, 4, 3))
    model.qconfig = torch.ao.quantization.default_qconfig
    prepared = torch.ao.quantization.prepare(model)
    prepared[0](torch.ones(2, 12))
    prepared[1](torch.ones(2, 3, 5, 5))
    return torch.ao.quantization.convert(prepared)


def _dynamic() -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def of_torch(make: Callable[[], nn.Module], *names: str) -> Callable[[Path], File]:
    def file(folder: Path) -> File:
        torch.manual_seed(0)
        model = make()
        torch.save(model.state_dict(), folder / "q.pt")
        weights = {f"{n}.weight": model.get_submodule(n).weight().dequantize().double() for n in names}
        return File(source=folder / "q.pt", weights=weights, live=model, fresh=False)

    return file


def recurrent(folder: Path) -> File:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LSTM(8, 6)), {nn.LSTM}, dtype=torch.qint8)
    torch.save(model.state_dict(), folder / "q.pt")
    return File(source=folder / "q.pt", error="more than tensors and plain containers: an object of torch.QInt8Storage")


int32, uint8 = torch.ones(8, 16, dtype=torch.int32), torch.ones(16, 8, dtype=torch.uint8)
SAID = "packed or quantised weights, whose scale is not known here"
NOT_READ = "not called a weight"
MLX, AO = "MLX", "torchao"
BNB, GPTQ, AWQ, CT, OPT, FP8 = "bitsandbytes", "GPTQ", "AWQ", "compressed-tensors", "modelopt", "8-bit floats"

CASES: dict[str, Case] = {
    "4 bits": Case(BNB, packed(lambda: pack.four_bits(nested=False))),
    "4 bits with scales of 8 bits": Case(BNB, packed(lambda: pack.four_bits(nested=True))),
    "8 bits, a scale for a row": Case(BNB, packed(pack.int8_rows)),
    "4 bits and a key that is not known": Case(
        BNB, packed(lambda: pack.four_bits(nested=False), refused="not understood: rotation", rotation="hadamard")
    ),
    "int8 and zero points of rows": Case(CT, int8_with_zeros((256, 1))),
    "int8 and zero points of groups": Case(CT, int8_with_zeros((256, 6))),
    "int8 and one zero point": Case(CT, int8_with_zeros((1, 1), "l.zero_point")),
    "int8 and shifts of another name": Case(
        CT, int8_with_zeros((256, 6), "l.weight_shift", said="how l.weight_shift shifts it is not known")
    ),
    "float8 and a zero point of 0": Case(CT, one_zero),
    "MLX of 4 bits": Case(MLX, mlx(pack.affine(4, 64, 16))),
    "MLX of 8 bits": Case(MLX, mlx(pack.affine(8, 32, 16), key="quantization_config", mode="affine")),
    "MLX of 3 bits": Case(MLX, mlx(pack.affine(3, 32, 16))),
    "MLX of 6 bits": Case(MLX, mlx(pack.affine(6, 128, 16))),
    "MLX of experts": Case(MLX, mlx(pack.affine(5, 32, 3, 8))),
    "MLX with other settings for a layer": Case(
        MLX, mlx(pack.affine(2, 64, 16), bits=4, group_size=32, w={"bits": 2, "group_size": 64}, v=False)
    ),
    "MLX with settings that do not fit": Case(
        MLX, mlx(pack.affine(4, 64, 16), bits=8, refused="no configuration tells bits and groups that fit")
    ),
    "MLX in another mode": Case(MLX, mlx(pack.affine(4, 32, 16), mode="nvfp4", refused="the mode nvfp4, which")),
    "GPTQ of 4 bits": Case(GPTQ, packed(lambda: pack.gptq(4, 1, order=True))),
    "GPTQ of 8 bits": Case(GPTQ, packed(lambda: pack.gptq(8, 1, order=True))),
    "GPTQ of 2 bits": Case(GPTQ, packed(lambda: pack.gptq(2, 2, order=True))),
    "GPTQ of version 2": Case(GPTQ, packed(lambda: pack.gptq(4, 2, order=False))),
    "GPTQ with quantize_config.json": Case(
        GPTQ, packed(lambda: pack.gptq(4, 1, order=False), beside="quantize_config.json", desc_act=False, sym=True)
    ),
    "GPTQ without the order of its groups": Case(
        GPTQ, packed(lambda: pack.gptq(4, 1, order=False), desc_act=True, refused="the order of its groups")
    ),
    "GPTQ repacked for Marlin": Case(
        GPTQ, packed(lambda: pack.gptq(4, 1, order=True), checkpoint_format="marlin", refused="format marlin, which")
    ),
    "GPTQ marked as Marlin": Case(
        GPTQ, packed(lambda: pack.gptq(4, 1, order=True), is_marlin_format=True, refused="is_marlin_format True")
    ),
    "GPTQ with other settings for some layers": Case(
        GPTQ, packed(lambda: pack.gptq(4, 1, order=True), dynamic={"+:w": {"bits": 4}, ".*": {"bits": 8}}, bits=8)
    ),
    "GPTQ with other settings for some layers, which do not fit": Case(
        GPTQ, packed(lambda: pack.gptq(4, 1, order=True), dynamic={"w": {"bits": 8}}, refused="states 8 bits")
    ),
    "GPTQ of a layer that is left out": Case(
        GPTQ, packed(lambda: pack.gptq(4, 1, order=True), dynamic={"-:w": {}}, refused="out of the quantisation")
    ),
    "GPTQ, version 2 that is named version 1": Case(GPTQ, packed(lambda: pack.symmetric_gptq(4, named=1, written=2))),
    "GPTQ, version 1 that is named version 2": Case(GPTQ, packed(lambda: pack.symmetric_gptq(8, named=2, written=1))),
    "GPTQ, symmetric": Case(GPTQ, packed(lambda: pack.symmetric_gptq(4, named=1, written=1))),
    "GPTQ with zero points of 0": Case(GPTQ, packed(pack.gptq_of_nonnegative_weights)),
    "GPTQ of 3 bits": Case(GPTQ, packed(lambda: pack.gptq(3, 1, order=True))),
    "GPTQ of 3 bits and version 2": Case(GPTQ, packed(lambda: pack.gptq(3, 2, order=False))),
    "GPTQ of 5 bits": Case(
        GPTQ,
        refused(
            {"w.qweight": torch.zeros(10, 16, dtype=torch.int32), "w.qzeros": torch.zeros(4, 2, dtype=torch.int32),
             "w.scales": torch.ones(4, 16), "w.g_idx": torch.zeros(64, dtype=torch.int32)},
            {"w.qweight": SAID, "w.scales": NOT_READ},
        ),
    ),
    "AWQ": Case(AWQ, packed(pack.awq)),
    "AWQ with its configuration": Case(
        AWQ, packed(pack.awq, quant_method="awq", bits=4, group_size=16, version="gemm", zero_point=True)
    ),
    "AWQ with quant_config.json": Case(
        AWQ, packed(pack.awq, beside="quant_config.json", w_bit=4, q_group_size=16, version="GEMM", zero_point=True)
    ),
    "AWQ packed for vectors": Case(
        AWQ, packed(pack.awq, quant_method="awq", version="gemv", refused="the version gemv, which is not read")
    ),
    "MXFP4": Case("OCP microscaling", packed(lambda: pack.mxfp4(1), quant_method="mxfp4")),
    "MXFP4 of experts": Case("OCP microscaling", packed(lambda: pack.mxfp4(3), quant_method="mxfp4")),
    "packed integers of 4 bits": Case(CT, packed(lambda: pack.packed_integers(4, 4))),
    "packed integers of 8 bits": Case(CT, packed(lambda: pack.packed_integers(8, 1))),
    "packed integers of 2 bits": Case(CT, packed(lambda: pack.packed_integers(2, 2))),
    "packed integers of 3 bits": Case(CT, packed(lambda: pack.packed_integers(3, 4))),
    "packed integers of 5 bits": Case(CT, packed(lambda: pack.packed_integers(5, 1, columns=60))),
    "packed integers of 6 bits with zero points": Case(
        CT, packed(lambda: pack.packed_integers(6, 4, symmetric=False))
    ),
    "packed integers of 7 bits": Case(CT, packed(lambda: pack.packed_integers(7, 2))),
    "packed integers of other bits than stated": Case(CT, seven_in_words_of_four),
    "packed integers with zero points": Case(CT, packed(lambda: pack.packed_integers(4, 4, symmetric=False))),
    "packed integers with an order of groups": Case(CT, packed(lambda: pack.packed_integers(4, 4, order=True))),
    "packed integers of a width with a rest": Case(CT, packed(lambda: pack.packed_integers(4, 1, columns=60))),
    "packed integers after a rotation": Case(
        CT, packed(lambda: pack.packed_integers(4, 4), transform_config={"R1": {}}, refused="transform_config")
    ),
    "packed integers in a format that is not known": Case(
        CT, packed(lambda: pack.packed_integers(4, 4), format="marlin-24", refused="the format marlin-24")
    ),
    "values and a bit for each entry": Case(CT, packed(lambda: pack.with_bits("sparse-bitmask"))),
    "two values of four": Case(CT, packed(lambda: pack.with_bits("sparse-24-bitmask"))),
    "two codes of four": Case(CT, packed(lambda: pack.with_bits("sparse-24-bitmask", torch.int8))),
    "two 8-bit floats of four": Case(
        CT, packed(lambda: pack.with_bits("sparse-24-bitmask", torch.float8_e4m3fn)), float8=True
    ),
    "values and bits in another format": Case(
        CT, packed(lambda: pack.with_bits("sparse-bitmask"), sparsity_config={"format": "new"}, refused="config new")
    ),
    "NVFP4": Case(CT, packed(lambda: pack.packed_floats("nvfp4")), float8=True),
    "MXFP4, packed": Case(CT, packed(lambda: pack.packed_floats("mxfp4"))),
    "NVFP4 of modelopt": Case(OPT, packed(lambda: pack.packed_floats("modelopt")), float8=True),
    "NVFP4 without its second scale": Case(
        OPT,
        refused({"w.weight": uint8, "w.weight_scale": torch.ones(16, 1).to(torch.float8_e4m3fn)}, {"w.weight": SAID}),
        float8=True,
    ),
    "float8 of modelopt": Case(
        OPT, scaled("l.weight_scale", (), quant_method="modelopt", quant_algo="FP8"), float8=True
    ),
    "float8, one scale": Case(FP8, packed(lambda: pack.float8((1,), "_scale")), float8=True),
    "float8, a scale for a row": Case(FP8, packed(lambda: pack.float8((16, 1), "_scale")), float8=True),
    "float8, a scale for a block of 128": Case(
        FP8, packed(lambda: pack.float8((2, 3), "_scale_inv")), float8=True, slow=True
    ),
    "float8 of compressed-tensors": Case(CT, scaled("l.weight_scale", (1,)), float8=True),
    "float8 of ComfyUI": Case("ComfyUI", scaled("l.scale_weight", ()), float8=True),
    "float8 of TransformerEngine": Case("TransformerEngine", scaled("l.scale_inv", (1,)), float8=True),
    "float8 of quanto": Case("quanto", scaled("l.weight.scale", (256, 1), quant_method="quanto"), float8=True),
    "float8, a scale of two dimensions": Case(FP8, scaled("l.scale", (1, 1)), float8=True),
    "float8, a vector of scales": Case(FP8, scaled("l.weight_scale", (256,)), float8=True),
    "float8, a scale for a column": Case(FP8, scaled("l.weight_scale", (1, 192)), float8=True),
    "float8, a scale for a large block": Case(FP8, scaled("l.weight_scale_inv", (4, 3)), float8=True),
    "float8, a scale for a block of 2": Case(FP8, scaled("l.weight_scale", (128, 96)), float8=True),
    "float8, blocks of 64 by the configuration": Case(FP8, blocks_of_64, float8=True),
    "float8, blocks that do not fit": Case(
        FP8, other_blocks({"quant_method": "fp8", "weight_block_size": [32, 32]}, "scales it is not known"), float8=True
    ),
    "float8, blocks of text": Case(
        FP8, other_blocks({"quant_method": "fp8", "weight_block_size": [10**30, "x"]}, "not known"), float8=True
    ),
    "float8, blocks of 64 with a rest, or of 50": Case(
        FP8,
        refused(
            {"l.weight": normal(200, 320).to(torch.float8_e4m3fn), "l.weight_scale_inv": torch.rand(4, 5) + 0.5},
            {"l.weight": "float8_e4m3fn, and how l.weight_scale_inv scales it is not known"},
        ),
        float8=True,
    ),
    "float8 with a second scale": Case(
        FP8,
        refused(
            {
                "l.weight": W.to(torch.float8_e4m3fn),
                "l.weight_scale": torch.ones(256, 1),
                "l.weight_global_scale": torch.tensor(0.5),
            },
            {"l.weight": "float8_e4m3fn, and how l.weight_global_scale scales it is not known"},
        ),
        float8=True,
    ),
    "float8 of a method that is not known": Case(
        FP8, other_blocks({"quant_method": "new"}, "quantised by new, which is not read"), float8=True
    ),
    "float8 with a rotation": Case(
        FP8, other_blocks({"quant_method": "fp8", "rotation": "hadamard"}, "not understood: rotation"), float8=True
    ),
    "float8 beside what may be its scale": Case(
        FP8,
        refused(
            {"l.weight": W.to(torch.float8_e4m3fn), "l.factor": torch.ones(256, 1)},
            {"l.weight": "float8_e4m3fn, and how l.factor scales it is not known"},
        ),
        float8=True,
    ),
    "float8 alone": Case(FP8, alone, float8=True),
    "MXFP8": Case("OCP microscaling", mxfp8, float8=True),
    "float8 of experts, a vector of scales": Case(FP8, experts((3,)), float8=True),
    "float8 of experts, a scale each": Case(FP8, experts((3, 1, 1)), float8=True),
    "torchao's int8": Case(AO, parts_of_torchao((32, 1), torch.int8, quant_method="torchao")),
    "torchao's int4 in int8, groups": Case(AO, parts_of_torchao((32, 2), torch.int8)),
    "torchao's float8": Case(AO, parts_of_torchao((32, 1), None, quant_method="torchao"), float8=True),
    "torchao's int8 and zero points of floats": Case(
        AO, parts_of_torchao((32, 2), torch.bfloat16, said="how l._weight_zero_point shifts it is not known")
    ),
    "quanto's int8": Case("quanto", parts_of_quanto(torch.int8)),
    "quanto's float8": Case("quanto", parts_of_quanto(torch.float8_e4m3fn), float8=True),
    "int8 of compressed-tensors": Case(CT, int8_rows("l.weight_scale", (32, 1))),
    "int8, a vector of scales": Case("SmoothQuant", int8_rows("l.weight_scale", (32,))),
    "HQQ": Case("HQQ", refused({"w.W_q": uint8, "w.scale": torch.ones(64, 1), "w.zero": torch.ones(64, 1)},
                               {"w.W_q": SAID, "w.scale": NOT_READ})),
    "AQLM": Case("AQLM", refused({"w.codes": torch.ones(4, 8, 2, dtype=torch.int8), "w.scales": torch.ones(4, 1, 1, 1),
                                  "w.codebooks": normal(2, 256, 1, 8)},
                                 {"w.codes": "how w.scales scales it is not known", "w.codebooks": NOT_READ})),
    "EETQ": Case("EETQ", refused({"w.qweight": torch.ones(8, 16, dtype=torch.int8), "w.weight_scales": torch.ones(16)},
                                 {"w.qweight": SAID})),
    "Marlin of 2:4 sparse weights": Case(
        CT, refused({"w.weight_packed": int32, "w.scale_packed": torch.ones(1, 16), "w.meta": int32.short()},
                    {"w.weight_packed": SAID, "w.meta": "int16: packed"})),
    "Marlin of 2:4 sparse weights, by its configuration": Case(
        CT, left(lambda: {"weight_packed": codes(4, 128), "scale_packed": normal(2, 64), "meta": codes(64, 8).short(),
                          "weight_shape": torch.tensor([64, 64])}, "the format marlin-24, which is not read",
                 **{**pack.compressed(num_bits=4, type="int"), "format": "marlin-24"})),
    "AQLM, by its configuration": Case(
        "AQLM", left(lambda: {"codes": codes(64, 8, 1).short(), "codebooks": normal(1, 256, 1, 8),
                              "scales": normal(64, 1, 1, 1)}, "by aqlm,", quant_method="aqlm", num_codebooks=1)),
    "EXL2": Case(
        "ExLlamaV2", left(lambda: {"q_weight": codes(12, 64), "q_scale": codes(4, 8), "q_scale_max": normal(4),
                                   "q_groups": codes(8).short(), "q_invperm": codes(64)}, "by exl2,",
                          quant_method="exl2", bits=4.0)),
    "EXL3": Case(
        "ExLlamaV3", left(lambda: {"trellis": codes(4, 4, 64).short(), "suh": normal(64), "svh": normal(64)},
                          "by exl3,", quant_method="exl3", bits=4.0)),
    "QuIP#": Case(
        "QuIP#", left(lambda: {"Qidxs": codes(64, 8).long(), "SU": normal(64), "SV": normal(64),
                               "Wscale": torch.tensor(1.0), "codebook_id": torch.tensor(7)}, "by quip,",
                      quant_method="quip")),
    "VPTQ": Case(
        "VPTQ", left(lambda: {"indices": codes(1, 64, 16), "centroids.weight": normal(1, 2048), "perm": codes(64),
                              "res_centroids.weight": normal(1, 2048), "weight_scale": normal(64)}, "by vptq,",
                     quant_method="vptq")),
    "HIGGS": Case(
        "HIGGS", left(lambda: {"weight": codes(64, 8).short(), "scales": normal(64, 1), "tables": normal(16, 2)},
                      "by higgs,", quant_method="higgs")),
    "BitNet": Case(
        "BitNet", left(lambda: {"weight": codes(16, 64).byte(), "weight_scale": normal(1)}, "by bitnet,",
                       quant_method="bitnet")),
    "statically quantised": Case("torch.ao.quantization", of_torch(_static, "0", "1")),
    "dynamically quantised": Case("torch.ao.quantization", of_torch(_dynamic, "0", "1")),
    "dynamically quantised LSTM": Case("torch.ao.quantization", recurrent),
}  # fmt: skip
