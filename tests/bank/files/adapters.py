"""Adapters of peft in folders as it saves them: what it loads and merges, or a refusal; never the base unchanged."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bank.files.case import Case, File
from foreign import transformers


class Net(nn.Module):
    config = {"model_type": "custom"}  # noqa: RUF012 — peft reads it

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.q, self.v, self.ln = nn.Embedding(30, 64), nn.Linear(64, 64), nn.Linear(64, 32), nn.LayerNorm(32)
        self.c = transformers().pytorch_utils.Conv1D(48, 32)
        self.conv, self.head = nn.Conv2d(4, 8, 3), nn.Linear(32, 5)
        self.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(16, 16)}) for _ in range(3))
        self.mha = nn.MultiheadAttention(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ln(self.v(self.q(self.emb(x)))))


class Experts(nn.Module):
    def __init__(self, units: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, units, 16)), nn.Parameter(torch.randn(3, 16, 24))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ehi,bi->bh", self.up, x)


class Mixture(nn.Module):
    config = {"model_type": "custom"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.gate = Experts(), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x)


class GatedMixture(Mixture):
    """Experts as in Mixtral, and a router that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.router = Experts(48), Router()


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table.mT


def peft() -> Any:
    """peft, or a skip with the reason."""
    transformers()  # peft imports it, and that torchvision
    return pytest.importorskip("peft")


@cache
def base(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def plain(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def adapted(config: Any, of: nn.Module) -> nn.Module:
    """The model with adapters whose every parameter was moved."""
    torch.manual_seed(1)
    model: nn.Module = peft().get_peft_model(copy.deepcopy(of), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def saved(
    config: str,
    *,
    refused: str = "",
    error: str = "",
    of: type[nn.Module] = Net,
    inner: Mapping[str, str] | None = None,
    changes: Mapping[str, Any] | None = None,
    beside: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Callable[[Path], File]:
    """A folder of `save_pretrained`, and what `from_pretrained` and `merge_and_unload` make of it.

    Args:
        config: a class of peft. `inner`: options that are configurations of peft themselves.
        refused: why the tensors that the adapters change are not compared. `error`: why the folder is not.
        changes: of the configuration file, after it was written. `beside`: further tensors of the file.
    """

    def file(folder: Path) -> File:
        kind = getattr(peft(), config, None)
        if kind is None:
            pytest.skip(f"this peft has no {config}")
        made = {key: getattr(peft(), name)() for key, name in (inner or {}).items()}
        model = adapted(kind(**options, **made), base(of))
        model.save_pretrained(folder)
        before = plain(base(of))
        loaded = peft().PeftModel.from_pretrained(copy.deepcopy(base(of)), folder)
        merged = plain(loaded.merge_and_unload())
        if changes:
            rewrite(folder, **changes)
        if beside:
            path = folder / "adapter_model.safetensors"
            save_file({**load_file(path), **beside}, path)
        changed = {name for name, value in merged.items() if not torch.equal(value, before[name])}
        assert changed
        weights = {n: v.double() for n, v in merged.items() if not error and (not refused or n not in changed)}
        said = dict.fromkeys(changed, refused) if refused else {}
        return File(source=folder, weights=weights, refused=said, error=error, base=before, fresh=False, exact=1e-4)

    return file


def lora(*, refused: str = "", **options: Any) -> Callable[[Path], File]:
    return saved("LoraConfig", refused=refused, **{"r": 4, "lora_alpha": 7, "target_modules": ["q"], **options})


def both_stacks(folder: Path) -> File:
    """A base without routers, which would tell that the stacks are matrices one below the other."""
    made = lora(of=GatedMixture, target_modules=[], target_parameters=UP + DOWN)(folder)
    stacks = {*UP, *DOWN}
    base, weights = ({n: v for n, v in held.items() if n in stacks} for held in (made.base or {}, made.weights))
    return replace(made, base=base, weights=weights)


def packed_attention(folder: Path) -> File:
    """peft 0.21 adds the change of the output projection twice; here it is what the adapter defines."""
    made = lora(target_modules=["mha"])(folder)
    state = load_file(folder / "adapter_model.safetensors")
    before, name = made.base or {}, "mha.out_proj.weight"
    down, up = (state[f"base_model.model.mha.base_layer.out_proj.lora_{p}.weight"].double() for p in "AB")
    return replace(made, weights={**made.weights, name: before[name].double() + 7 / 4 * up @ down})


def fresh(**options: Any) -> Callable[[Path], File]:
    """Adapters before their first step: B is 0."""

    def file(folder: Path) -> File:
        torch.manual_seed(1)
        config = peft().LoraConfig(r=4, target_modules=["q", "v"], **options)
        peft().get_peft_model(copy.deepcopy(base()), config).save_pretrained(folder)
        before = plain(base())
        return File(source=folder, weights={n: v.double() for n, v in before.items()}, base=before)

    return file


def of_type(name: str) -> str:
    return rf"no name in common.*an adapter of type {name}, which is not computed|without adapters that are read"


QV: dict[str, Any] = {"target_modules": ["q", "v"]}
FILES = "peft: save_pretrained"
UP, DOWN = ["experts.up"], ["experts.down"]

CASES: dict[str, Case] = {
    # tuners
    "LoRA of four kinds of layers": Case(FILES, lora(target_modules=["q", "v", "emb", "conv"])),
    "AdaLoRA": Case(FILES, saved("AdaLoraConfig", total_step=10, **QV), slow=True),
    "OFT": Case(FILES, saved("OFTConfig", oft_block_size=4, **QV)),
    "OFT, exact": Case(FILES, saved("OFTConfig", oft_block_size=8, use_cayley_neumann=False, **QV), slow=True),
    "OFT with shared blocks": Case(FILES, saved("OFTConfig", oft_block_size=8, block_share=True, **QV), slow=True),
    "OFT, constrained": Case(FILES, saved("OFTConfig", oft_block_size=8, coft=True, eps=0.05, **QV), slow=True),
    "OFT with too many terms": Case(
        FILES, saved("OFTConfig", oft_block_size=4, changes={"num_cayley_neumann_terms": 10**9},
                     refused="terms of the Neumann series", **QV), slow=True),
    "trained tokens": Case(FILES, saved("TrainableTokensConfig", target_modules=["emb"], token_indices=[1, 2])),
    "BOFT": Case(FILES, saved("BOFTConfig", boft_block_size=4, error=of_type("BOFT"), **QV), slow=True),
    "VeRA": Case(FILES, saved("VeraConfig", error=of_type("VERA"), target_modules=["q"]), slow=True),
    "IA3": Case(FILES, saved("IA3Config", feedforward_modules=[], error=of_type("IA3"), **QV)),
    "LoHa": Case(FILES, saved("LoHaConfig", error=of_type("LOHA"), **QV), slow=True),
    "LoKr": Case(FILES, saved("LoKrConfig", error=of_type("LOKR"), **QV), slow=True),
    "HRA": Case(FILES, saved("HRAConfig", error=of_type("HRA"), **QV), slow=True),
    "FourierFT": Case(FILES, saved("FourierFTConfig", n_frequency=20, error=of_type("FOURIERFT"), **QV), slow=True),
    "VB-LoRA": Case(
        FILES, saved("VBLoRAConfig", vector_length=16, num_vectors=8, error=of_type("VBLORA"), **QV), slow=True),
    "RandLoRA": Case(FILES, saved("RandLoraConfig", error=of_type("RANDLORA"), target_modules=["q"]), slow=True),
    "SHiRA": Case(FILES, saved("ShiraConfig", r=2, error=of_type("SHIRA"), **QV), slow=True),
    "MiSS": Case(FILES, saved("MissConfig", r=4, error=of_type("MISS"), **QV), slow=True),
    "DeLoRA": Case(FILES, saved("DeloraConfig", error=of_type("DELORA"), **QV), slow=True),
    "GraLoRA": Case(FILES, saved("GraloraConfig", error=of_type("GRALORA"), **QV), slow=True),
    "LN tuning": Case(FILES, saved("LNTuningConfig", target_modules=["ln"], error=of_type("LN_TUNING")), slow=True),
    # options of LoRA
    "alpha by a regular expression": Case(FILES, lora(alpha_pattern={r"layers\.[02]\.q": 3, "^q": 64})),
    "alpha, the first of two": Case(FILES, lora(alpha_pattern={"layers.1.q": 2, "q": 64}), slow=True),
    "alpha by a class of characters": Case(FILES, lora(alpha_pattern={"[qv]": 3}, **QV), slow=True),
    "alpha of rank-stabilised ones": Case(FILES, lora(use_rslora=True, alpha_pattern={r".*\.1\..*": 1})),
    "ranks and alphas": Case(FILES, lora(rank_pattern={"^q": 2}, alpha_pattern={r"layers\.\d+\.q": 5})),
    "alpha by a pattern that takes for ever": Case(
        FILES, lora(changes={"alpha_pattern": {"(a+)+q": 3}})),
    "alpha by a pattern with brackets that close": Case(
        FILES, lora(changes={"alpha_pattern": {"q)|(v": 3}}, refused="alpha_pattern"), slow=True),
    "alpha by a pattern that looks back": Case(
        FILES, lora(changes={"alpha_pattern": {"(?<=a)q": 3}}, refused="alpha_pattern")),
    "PiSSA": Case(FILES, lora(init_lora_weights="pissa", alpha_pattern={"^q": 3})),
    "PiSSA of Conv1D": Case(
        FILES, lora(init_lora_weights="pissa", target_modules=["c"], fan_in_fan_out=True), slow=True),
    "PiSSA by iterations": Case(
        FILES, lora(init_lora_weights="pissa_niter_4", refused="'pissa_niter_4' changes the base"), slow=True),
    "OLoRA": Case(FILES, lora(init_lora_weights="olora")),
    "OLoRA, rank-stabilised": Case(
        FILES, lora(init_lora_weights="olora", use_rslora=True, target_modules=["v"]), slow=True),
    "orthogonal start": Case(FILES, lora(init_lora_weights="orthogonal"), slow=True),
    "Gaussian start": Case(FILES, lora(init_lora_weights="gaussian"), slow=True),
    "CorDA": Case(FILES, lora(changes={"init_lora_weights": "corda"}, refused="'corda' changes the base"), slow=True),
    "LoftQ": Case(FILES, lora(changes={"init_lora_weights": "loftq"}, refused="'loftq' changes the base"), slow=True),
    "biases of B": Case(FILES, lora(lora_bias=True, target_modules=["q", "conv"])),
    "biases of the base": Case(FILES, lora(bias="lora_only"), slow=True),
    "all biases": Case(FILES, lora(bias="all"), slow=True),
    "LoRA and trained tokens": Case(FILES, lora(trainable_token_indices={"emb": [1, 7]}), slow=True),
    "DoRA": Case(FILES, lora(use_dora=True, **QV)),
    "DoRA of a convolution": Case(FILES, lora(use_dora=True, target_modules=["conv"])),
    "DoRA of Conv1D": Case(FILES, lora(use_dora=True, target_modules=["c"], fan_in_fan_out=True), slow=True),
    "DoRA of an embedding": Case(FILES, lora(use_dora=True, target_modules=["emb"]), slow=True),
    "rank-stabilised DoRA": Case(FILES, lora(use_dora=True, use_rslora=True), slow=True),
    "LoRA of packed attention": Case(FILES, packed_attention),
    "a trained head and norm": Case(FILES, lora(modules_to_save=["head", "ln"])),
    "KaSA": Case(
        FILES, lora(inner={"kasa_config": "KasaConfig"}, refused="not understood: kasa_config"), slow=True),
    "some layers by number": Case(FILES, lora(layers_to_transform=[1], layers_pattern="layers"), slow=True),
    "LoRA of stacked experts": Case(FILES, lora(of=Mixture, target_modules=[], target_parameters=UP)),
    "LoRA of stacked experts, rank-stabilised": Case(
        FILES, lora(of=Mixture, target_modules=[], target_parameters=DOWN, use_rslora=True), slow=True),
    "LoRA of stacked experts and a gate": Case(
        FILES, lora(of=Mixture, target_modules=["gate"], target_parameters=UP, alpha_pattern={"experts.up": 3})),
    "LoRA of two parameters of one module": Case(
        FILES, lora(of=Mixture, target_modules=[], target_parameters=UP + DOWN,
                    refused="which of the layer's parameters it changes is not known")),
    "LoRA of two parameters of other shapes": Case(FILES, both_stacks),
    "LoRA of two parameters with an alpha each": Case(
        FILES, lora(of=GatedMixture, target_modules=[], target_parameters=UP + DOWN,
                    alpha_pattern={"experts.down": 3}, refused="says different things of experts.up and")),
    "LoRA of a parameter that is a matrix": Case(
        FILES, lora(of=GatedMixture, target_modules=[], target_parameters=["router.table"])),
    "LoRA before the first step": Case(FILES, fresh()),
    "DoRA before the first step": Case(FILES, fresh(use_dora=True), slow=True),
    # configurations that are not understood
    "a key that is new": Case(FILES, lora(changes={"twist": 3}, refused="a key that is not understood: twist")),
    "a type of another tuner": Case(FILES, lora(changes={"peft_type": "LOHA"}, refused="an adapter of type LOHA")),
    "a type that is a number": Case(FILES, lora(changes={"peft_type": 7}, refused="an adapter of type 7"), slow=True),
    "an alpha of text": Case(FILES, lora(changes={"lora_alpha": "eight"}, refused="scale is not known"), slow=True),
    "an alpha without end": Case(FILES, lora(changes={"lora_alpha": 10**400}, refused="scale is not known"), slow=True),
    "patterns of a list": Case(FILES, lora(changes={"alpha_pattern": [1]}, refused="alpha_pattern"), slow=True),
    "a pattern that is none": Case(
        FILES, lora(changes={"alpha_pattern": {"(": 3}}, refused="alpha_pattern"), slow=True),
    "an initialisation of a list": Case(
        FILES, lora(changes={"init_lora_weights": [1]}, refused="'[1]' changes the base"), slow=True),
    "a part of the adapter that is new": Case(
        FILES, lora(target_modules=["v"], beside={"base_model.model.v.lora_magic": torch.ones(3)},
                    refused="the adapter has a part that is not read: lora_magic")),
}  # fmt: skip
