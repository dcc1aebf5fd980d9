"""Adapters under the names of diffusers, kohya's scripts, LyCORIS, loralib and others, as they write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bank.files.case import Case, File, normal

RANK, ALPHA = 4, 2.0
Q, V, CONV = "down_blocks.0.attentions.0.to_q", "down_blocks.0.attentions.0.to_v", "mid_block.conv"
BASE: dict[str, Tensor] = {
    f"{Q}.weight": normal(32, 16, seed=1), f"{V}.weight": normal(24, 16, seed=2), f"{V}.bias": normal(24, seed=3),
    f"{CONV}.weight": normal(32, 16, 3, 3, seed=4), "norm.weight": torch.ones(32),
}  # fmt: skip
A, B = normal(RANK, 16, seed=5), normal(32, RANK, seed=6)
DELTA = B.double() @ A.double()
Change = Mapping[str, Tensor]


def adapters(
    state: Mapping[str, Tensor],
    change: Change | None = None,
    *,
    base: Mapping[str, Tensor] = BASE,
    refused: Mapping[str, str] | None = None,
    error: str = "",
    fresh: bool = False,
    header: Mapping[str, str] | None = None,
) -> Callable[[Path], File]:
    """A file of adapters, and the changes of the base that the tool makes; what is not named stays as it is.

    Args:
        header: the texts in the file's header.
    """

    def file(folder: Path) -> File:
        held = {name: value.clone().contiguous() for name, value in state.items()}
        save_file(held, folder / "lora.safetensors", metadata=None if header is None else {**header})
        said = refused or {}
        weights = {n: w.double() + (change or {}).get(n, 0) for n, w in base.items() if n not in said and not error}
        return File(
            source=folder / "lora.safetensors", weights=weights, refused=said, error=error, base=base, fresh=fresh
        )

    return file


def pair(
    path: str, names: tuple[str, str] = ("lora_down.weight", "lora_up.weight"), **more: Tensor
) -> dict[str, Tensor]:
    """The two factors of the change of a 32×16 matrix, and further parts."""
    return {f"{path}.{names[0]}": A, f"{path}.{names[1]}": B, **{f"{path}.{key}": value for key, value in more.items()}}


def flat(path: str) -> str:
    return path.replace(".", "_")


alpha, PEFT = torch.tensor(ALPHA), ("lora_A.weight", "lora_B.weight")
HALF = {f"{Q}.weight": ALPHA / RANK * DELTA}
ALL = dict.fromkeys(BASE, "not known")
UNKNOWN = {f"{Q}.weight": "the adapter's scale is not known"}
HADA = {"hada_w1_a": normal(32, 2), "hada_w1_b": normal(2, 16), "hada_w2_a": normal(32, 2), "hada_w2_b": normal(2, 16)}


def under(path: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{path}.{key}": value for key, value in parts.items()}


def changed_by(path: str, part: str, *names: str) -> dict[str, str]:
    """The refusals of a layer with a part that is not read."""
    return {f"{path}.{name}": f"changed by {path}.{part}" for name in names or ("weight",)}


def dora(dim: int) -> Callable[[Path], File]:
    shape = (32, 1) if dim == 1 else (1, 16)
    scale = torch.linspace(0.5, 2, max(shape)).reshape(shape)
    total = BASE[f"{Q}.weight"].double() + HALF[f"{Q}.weight"]
    made = total / total.norm(dim=dim, keepdim=True) * scale.double()
    return adapters(pair(Q, alpha=alpha, dora_scale=scale), {f"{Q}.weight": made - BASE[f"{Q}.weight"].double()})


def tucker() -> Callable[[Path], File]:
    down, up, core = normal(4, 16, 1, 1, seed=7), normal(32, 4, 1, 1, seed=8), normal(4, 4, 3, 3, seed=9)
    change = torch.einsum("om,mrkl,ri->oikl", *(t.double() for t in (up[:, :, 0, 0], core, down[:, :, 0, 0])))
    state = {"lora_down.weight": down, "lora_up.weight": up, "lora_mid.weight": core, "alpha": alpha}
    return adapters(under(CONV, state), {f"{CONV}.weight": ALPHA / 4 * change})


def convolution() -> Callable[[Path], File]:
    down, up = normal(4, 16, 3, 3, seed=7), normal(32, 4, 1, 1, seed=8)
    change = (up.flatten(1).double() @ down.flatten(1).double()).reshape(32, 16, 3, 3)
    state = {"lora_down.weight": down, "lora_up.weight": up, "alpha": alpha}
    return adapters(under(f"lora_unet_{flat(CONV)}", state), {f"{CONV}.weight": ALPHA / 4 * change})


def fresh_pair() -> Callable[[Path], File]:
    return adapters({**pair(Q, alpha=alpha), f"{Q}.lora_up.weight": torch.zeros(32, RANK)}, fresh=True)


def headed(change: Change, model: str = "unet.", **config: object) -> Callable[[Path], File]:
    """A file with the configuration in its header, as `save_lora_weights` writes it; another model has another one."""
    mine = {"r": RANK, "lora_alpha": ALPHA, "peft_type": "LORA", "target_modules": ["to_q"], **config}
    all_of = {f"{model}{key}": value for key, value in mine.items()}
    all_of |= {f"text_encoder.{key}": value for key, value in {"r": RANK, "lora_alpha": 77}.items()} if model else {}
    header = {"format": "pt", "lora_adapter_metadata": json.dumps(all_of)}
    return adapters(pair(f"{model}{Q}", PEFT), change, header=header)


def both(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**first, **second}


KOHYA, DIFFUSERS, LYCORIS, COMFY = "kohya sd-scripts", "diffusers", "LyCORIS", "ComfyUI"
FLAT = f"lora_unet_{flat(Q)}"
OLD = ("lora.down.weight", "lora.up.weight")
NO_NAME = "no name in common|without adapters that are read"

CASES: dict[str, Case] = {
    "names with dots": Case(KOHYA, adapters(pair(Q, alpha=alpha), HALF)),
    "names with underscores": Case(KOHYA, adapters(pair(FLAT, alpha=alpha), HALF)),
    "an alpha of one dimension": Case(KOHYA, adapters(pair(FLAT, alpha=alpha.reshape(1)), HALF)),
    "no alpha": Case(KOHYA, adapters(pair(Q), refused=UNKNOWN)),
    "no alpha under names with underscores": Case(KOHYA, adapters(pair(FLAT), refused=UNKNOWN)),
    "names of a layer that the base lacks": Case(
        KOHYA, adapters(both(pair(FLAT, alpha=alpha), pair("lora_te_text_model_q", alpha=alpha)), HALF,
                        refused={n: "" for n in BASE if n != f"{Q}.weight"})),
    "a convolution": Case(KOHYA, convolution()),
    "a Tucker core": Case(LYCORIS, tucker()),
    "norms of the outputs": Case(LYCORIS, dora(1)),
    "norms of the inputs": Case(LYCORIS, dora(0)),
    "before the first step": Case(KOHYA, fresh_pair()),
    "half precision": Case(
        KOHYA,
        adapters({k: v.bfloat16() for k, v in pair(Q, alpha=alpha).items()},
                 {f"{Q}.weight": ALPHA / RANK * B.bfloat16().double() @ A.bfloat16().double()})),
    "factors that do not fit": Case(
        KOHYA, adapters({f"{Q}.lora_down.weight": A, f"{Q}.lora_up.weight": normal(32, 3)},
                        refused={f"{Q}.weight": "do not fit"})),
    "one factor of two": Case(
        KOHYA, adapters({f"{Q}.lora_down.weight": A, f"{Q}.alpha": alpha}, refused={f"{Q}.weight": "has no partner"})),
    "a change of another shape": Case(
        KOHYA, adapters(under(V, {"lora_down.weight": A, "lora_up.weight": B, "alpha": alpha}),
                        refused={f"{V}.weight": "the adapter is made for a weight of the shape (32, 16)"})),
    "attention processors, old": Case(
        DIFFUSERS, adapters({"down_blocks.0.attentions.0.processor.to_q_lora.down.weight": A,
                             "down_blocks.0.attentions.0.processor.to_q_lora.up.weight": B}, refused=UNKNOWN)),
    "lora.down and lora.up": Case(DIFFUSERS, adapters(pair(Q, OLD), refused=UNKNOWN)),
    "lora.down and lora.up with an alpha": Case(DIFFUSERS, adapters(pair(Q, OLD, alpha=alpha), HALF)),
    "lora_A and lora_B under unet": Case(DIFFUSERS, adapters(pair(f"unet.{Q}", PEFT), refused=UNKNOWN)),
    "lora_A and lora_B with an alpha": Case(DIFFUSERS, adapters(pair(f"unet.{Q}", PEFT, alpha=alpha), HALF)),
    "lora_A and lora_B under transformer": Case(DIFFUSERS, adapters(pair(f"transformer.{Q}", PEFT, alpha=alpha), HALF)),
    "lora_A and lora_B under diffusion_model": Case(
        COMFY, adapters(pair(f"diffusion_model.{Q}", PEFT, alpha=alpha), HALF)),
    "a configuration in the header": Case(DIFFUSERS, headed(HALF)),
    "a configuration in the header of one model": Case(DIFFUSERS, headed(HALF, "")),
    "patterns in the header": Case(
        DIFFUSERS, headed({f"{Q}.weight": 3 * DELTA}, "transformer.", alpha_pattern={"0.to_q": 12, "to_v": 5})),
    "rank-stabilised in the header": Case(DIFFUSERS, headed({f"{Q}.weight": DELTA}, use_rslora=True)),
    "alpha and r as texts of the header": Case(
        "SimpleTuner", adapters(pair(f"transformer.{Q}", PEFT), HALF,
                                header={"transformer.lora_alpha": str(ALPHA), "transformer.r": str(RANK)})),
    "a header without an alpha": Case(
        DIFFUSERS, adapters(pair(f"unet.{Q}", PEFT), refused=UNKNOWN,
                            header={"lora_adapter_metadata": "{", "unet.lora_alpha": "no number", "alpha": "8"})),
    "norms in the names of peft": Case(
        DIFFUSERS, adapters(pair(Q, PEFT, alpha=alpha, lora_magnitude_vector=torch.ones(32)),
                            {f"{Q}.weight": torch.nn.functional.normalize(BASE[f"{Q}.weight"].double()
                             + HALF[f"{Q}.weight"], dim=1) - BASE[f"{Q}.weight"].double()})),
    "biases of B under unet": Case(
        DIFFUSERS, adapters({f"{V}.lora_A.weight": A, f"{V}.lora_B.weight": normal(24, RANK), f"{V}.lora_B.bias":
                             torch.ones(24), f"{V}.alpha": alpha},
                            {f"{V}.weight": ALPHA / RANK * normal(24, RANK).double() @ A.double(),
                             f"{V}.bias": ALPHA / RANK * torch.ones(24).double()})),
    "LoHa of LyCORIS": Case(LYCORIS, adapters(under(Q, {**HADA, "alpha": alpha}), error=NO_NAME)),
    "LoHa under names with underscores": Case(LYCORIS, adapters(under(FLAT, {**HADA, "alpha": alpha}), error=NO_NAME)),
    "LoRA and LoHa": Case(
        LYCORIS, adapters(both(pair(Q, alpha=alpha), under(V, HADA)), HALF,
                          refused=changed_by(V, "hada_w", "weight", "bias"))),
    "LoRA and LoHa under names with underscores": Case(
        LYCORIS, adapters(both(pair(FLAT, alpha=alpha), under(f"lora_unet_{flat(V)}", HADA)), HALF,
                          refused={f"{V}.{n}": "hada_w2_b, which is not read" for n in ("weight", "bias")})),
    "LoRA and LoKr": Case(
        LYCORIS, adapters(both(pair(Q, alpha=alpha), under(V, {"lokr_w1": A, "lokr_w2": normal(6, 4)})), HALF,
                          refused=changed_by(V, "lokr_w", "weight", "bias"))),
    "LoRA and a whole difference": Case(
        LYCORIS, adapters(both(pair(Q, alpha=alpha), under(V, {"diff": normal(24, 16)})), HALF,
                          refused=changed_by(V, "diff", "weight", "bias"))),
    "LoRA and the difference of a bias": Case(
        LYCORIS, adapters(both(pair(Q, alpha=alpha), under(V, {"diff_b": normal(24)})), HALF,
                          refused=changed_by(V, "diff_b", "weight", "bias"))),
    "LoRA and the difference of a norm": Case(
        LYCORIS, adapters(both(pair(Q, alpha=alpha), {"norm.w_norm": torch.ones(32)}), HALF,
                          refused=changed_by("norm", "w_norm", "weight"))),
    "a trained scalar": Case(
        LYCORIS, adapters(pair(Q, alpha=alpha, scalar=torch.tensor(0.5)), refused=changed_by(Q, "scalar"))),
    "IA3 of LyCORIS": Case(LYCORIS, adapters(under(Q, {"weight": normal(1, 16), "on_input": torch.tensor(True)}),
                                  refused=dict.fromkeys(BASE, ""))),
    "OFT of kohya": Case(KOHYA, adapters(under(Q, {"oft_blocks": normal(4, 4, 4), "alpha": alpha}),
                                         refused={f"{Q}.weight": "oft"})),
    "GLoRA": Case(LYCORIS, adapters(under(Q, {"a1.weight": normal(4, 16), "a2.weight": normal(16, 4),
                                              "b1.weight": normal(4, 16), "b2.weight": normal(32, 4)}), error=NO_NAME)),
    "loralib": Case("loralib", adapters(pair(Q, ("lora_A", "lora_B")), refused=UNKNOWN)),
    "a whole model of loralib": Case(
        "loralib", adapters({**BASE, **pair(Q, ("lora_A", "lora_B"))}, refused=UNKNOWN)),
    "a state dict of a wrapped model": Case(
        "peft: state_dict()", adapters(
            {f"base_model.model.{n.replace('to_q.weight', 'to_q.base_layer.weight')}": v for n, v in BASE.items()}
            | pair(f"base_model.model.{Q}", ("lora_A.default.weight", "lora_B.default.weight")), refused=UNKNOWN)),
    "two adapters of one layer": Case(
        "peft: state_dict()", adapters(
            pair(f"base_model.model.{Q}", ("lora_A.one.weight", "lora_B.one.weight"), alpha=alpha)
            | pair(f"base_model.model.{Q}", ("lora_A.two.weight", "lora_B.two.weight")),
            refused={f"{Q}.weight": "not known"})),
    "a part that is new": Case(
        KOHYA, adapters(pair(Q, alpha=alpha, lora_gate=torch.ones(32)),
                        refused={f"{Q}.weight": "the adapter has a part that is not read: lora_gate"})),
}  # fmt: skip
