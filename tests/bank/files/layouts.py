"""How layers store their weights: filters on other dimensions, several matrices in a tensor, gains, fixed kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bank.files.case import Case, File, floats, normal, stored
from foreign import timm, transformers


def layer(make: Callable[[], nn.Module], *, gains: bool = False) -> Callable[[Path], File]:
    """A layer of torch. `gains`: none of its tensors is a stack of filters."""

    def file(folder: Path) -> File:
        torch.manual_seed(0)
        model = nn.ModuleDict({"l": make()})
        return File(
            source=stored(folder, model.state_dict()), weights={} if gains else floats(model.state_dict()), live=model
        )

    return file


def tensors(
    state: Mapping[str, Tensor],
    *names: str,
    refused: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    views: Mapping[str, Tensor] | None = None,
    fresh: bool = True,
) -> Callable[[Path], File]:
    """Tensors under these names are weights as they are stored, those of `views` in another shape."""

    def file(folder: Path) -> File:
        weights = floats({name: state[name] for name in names} | dict(views or {}))
        return File(source=stored(folder, state, config), weights=weights, refused=refused or {}, fresh=fresh)

    return file


def of_transformers(make: Callable[[Any], nn.Module], experts: str = "") -> Callable[[Path], File]:
    """A small model of transformers, as `save_pretrained` writes it; `experts` are stored with that axis first."""

    def file(folder: Path) -> File:
        kit = transformers()
        torch.manual_seed(0)
        model: Any = make(kit).eval()
        model.save_pretrained(folder)
        weights = floats(
            {n: v for n, v in load_file(folder / "model.safetensors").items() if ".parametrizations." not in n}
        )
        for name, value in weights.items():
            if experts and value.ndim == 3:
                weights[name] = (value.mT if experts == "inputs" else value).flatten(0, 1)
        return File(source=folder, weights={**weights, **_computed(model)}, live=model)

    return file


def of_timm(name: str, **options: Any) -> Callable[[Path], File]:
    def file(folder: Path) -> File:
        torch.manual_seed(0)
        model = timm().create_model(name, num_classes=10, **options)
        torch.save(model.state_dict(), folder / "model.pth")
        return File(source=folder / "model.pth", weights=_weights(model), live=model)

    return file


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return floats(dict(model.named_parameters(remove_duplicate=False)))


def _computed(model: nn.Module) -> dict[str, Tensor]:
    """The weights that parametrizations of torch compute."""
    made = {}
    for path, module in model.named_modules():
        if nn.utils.parametrize.is_parametrized(module, "weight"):
            made[f"{path}.weight"] = module.weight
    return floats(made)


class Modulated(nn.Module):
    """StyleGAN2's: the weight has a first dimension of 1 for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(1, 16, 24, 3, 3))


def stacks(
    shapes: Mapping[str, tuple[int, ...]], beside: Mapping[str, tuple[int, ...]], turned: bool = False
) -> Callable[[Path], File]:
    """Stacks of experts, (experts, outputs, inputs), or turned, beside other tensors; matrices are weights as well."""
    held = {name: normal(*shape) for name, shape in (*shapes.items(), *beside.items())}
    views = {name: (held[name].mT if turned else held[name]).flatten(0, 1) for name in shapes}
    return tensors(held, *(name for name in beside if name.endswith("weight")), views=views)


ROUTER = {"mlp.router.weight": (3, 16)}


def modulated(folder: Path) -> File:
    """The weight is read without its first dimension."""
    made = layer(Modulated)(folder)
    return replace(made, weights={name: weight[0] for name, weight in made.weights.items()})


def sinusoids(rows: int, columns: int) -> Tensor:
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(columns // 2) / (columns // 2))
    return torch.cat((angles.sin(), angles.cos()), 1)


blur = torch.tensor([1.0, 3, 3, 1])
KERNEL = blur[:, None] * blur / 64
NOT_CALLED, GAINS = "not called a weight", "gains"
TORCH, GAN, HF, TIMM, MOE = "torch.nn", "StyleGAN", "transformers: save_pretrained", "timm: state_dict", "experts"
small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
llama: dict[str, Any] = {**small, "intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 32}
moe: dict[str, Any] = {**llama, "num_experts_per_tok": 2, "pad_token_id": None}
bert: dict[str, Any] = {**small, "intermediate_size": 24, "max_position_embeddings": 32}
seq: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
                       "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
                       "vocab_size": 40}  # fmt: skip
vision: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
                          "image_size": 16, "patch_size": 8}  # fmt: skip

CASES: dict[str, Case] = {
    **{name: Case(TORCH, layer(make)) for name, make in {
        "Linear": lambda: nn.Linear(16, 8), "Linear without a bias": lambda: nn.Linear(16, 8, bias=False),
        "Linear, square": lambda: nn.Linear(16, 16), "Conv1d": lambda: nn.Conv1d(4, 8, 3),
        "Conv2d": lambda: nn.Conv2d(4, 8, 3), "Conv2d in groups": lambda: nn.Conv2d(8, 8, 3, groups=2),
        "Conv2d, depthwise": lambda: nn.Conv2d(8, 8, 3, groups=8), "Conv3d": lambda: nn.Conv3d(4, 8, 3),
        "Conv1d of a long kernel": lambda: nn.Conv1d(1, 16, 251), "Conv2d of one output": lambda: nn.Conv2d(8, 1, 3),
        "Conv3d of one output": lambda: nn.Conv3d(3, 1, (3, 7, 7)),
        "ConvTranspose1d": lambda: nn.ConvTranspose1d(4, 6, 5), "ConvTranspose2d": lambda: nn.ConvTranspose2d(4, 8, 3),
        "ConvTranspose3d": lambda: nn.ConvTranspose3d(4, 8, 3), "Embedding": lambda: nn.Embedding(40, 16),
        "Embedding with padding": lambda: nn.Embedding(40, 16, padding_idx=0),
        "EmbeddingBag": lambda: nn.EmbeddingBag(40, 16),
        "LSTM": lambda: nn.LSTM(6, 5), "LSTM with projections": lambda: nn.LSTM(6, 12, proj_size=4),
        "LSTM in two directions": lambda: nn.LSTM(6, 12, proj_size=4, bidirectional=True, num_layers=2),
        "LSTM of one size": lambda: nn.LSTM(8, 8), "GRU": lambda: nn.GRU(6, 5, num_layers=2),
        "RNN": lambda: nn.RNN(6, 5),
        "LSTMCell": lambda: nn.LSTMCell(6, 5), "GRUCell": lambda: nn.GRUCell(6, 5),
        "attention": lambda: nn.MultiheadAttention(12, 2), "attention of other sizes":
            lambda: nn.MultiheadAttention(12, 2, kdim=6, vdim=8),
        "attention with biases of keys": lambda: nn.MultiheadAttention(12, 2, add_bias_kv=True),
        "Transformer layer": lambda: nn.TransformerEncoderLayer(12, 2, 20),
    }.items()},
    **{name: Case(TORCH, layer(make, gains=True)) for name, make in {
        "LayerNorm": lambda: nn.LayerNorm(16), "LayerNorm of two dimensions": lambda: nn.LayerNorm((16, 32)),
        "LayerNorm of maps": lambda: nn.LayerNorm((4, 8, 8)), "LayerNorm of four": lambda: nn.LayerNorm((2, 3, 4, 5)),
        "LayerNorm without shifts": lambda: nn.LayerNorm((8, 8), bias=False),
        "RMSNorm of two dimensions": lambda: nn.RMSNorm((16, 32)), "BatchNorm2d": lambda: nn.BatchNorm2d(8),
        "GroupNorm": lambda: nn.GroupNorm(2, 8), "PReLU": lambda: nn.PReLU(8),
    }.items()},
    "Bilinear": Case(TORCH, layer(lambda: nn.Bilinear(4, 5, 6))),
    "a modulated convolution": Case(GAN, modulated),
    "fixed kernels": Case(
        GAN, tensors({"up.blur.kernel": KERNEL, "down.filt": KERNEL[None, None].repeat(3, 1, 1, 1),
                      "blur.weight": KERNEL.expand(16, 1, 4, 4).clone(), "box.weight": torch.full((8, 1, 3, 3), 1 / 9),
                      "conv.weight": normal(8, 3, 3, 3)}, "conv.weight",
                     refused={"up.blur.kernel": NOT_CALLED, "blur": "the same kernel in every", "box": "fixed"})),
    "noise and a learned constant": Case(
        GAN, tensors({"input.const": normal(1, 16, 4, 4), "conv.noise_const": normal(8, 8),
                      "conv.weight": normal(8, 3, 3, 3)}, "conv.weight",
                     refused={"input.const": NOT_CALLED, "conv.noise_const": NOT_CALLED})),
    "sines and cosines of positions": Case(
        "fairseq", tensors({"embed_positions.weight": sinusoids(32, 16), "head.weight": normal(4, 16)}, "head.weight",
                           refused={"embed_positions.weight": "sines and cosines of positions"})),
    "positions and a class token": Case(
        "ViT", tensors({"pos_embed": normal(1, 17, 16), "cls_token": normal(1, 1, 16), "head.weight": normal(4, 16)},
                       "head.weight", refused={"pos_embed": NOT_CALLED, "cls_token": NOT_CALLED})),
    "gates named g and v": Case(
        "users", tensors({"mlp.w_g": normal(8, 4), "mlp.w_v": normal(8, 4), "a.weight_mask": torch.ones(4, 4),
                          "head.weight": normal(4, 8)}, "head.weight",
                         refused={"mlp.w_g": NOT_CALLED, "a.weight_mask": NOT_CALLED})),
    "weights with their inputs first": Case(
        "GPT-2", tensors({"c_fc.weight": normal(16, 64), "c_fc.bias": torch.zeros(64)}, "c_fc.weight")),
    "experts stored one after the other": Case(
        MOE, tensors({"experts.w1": normal(3, 24, 16), "experts.w2": normal(3, 16, 24)},
                     refused={"experts.w1": NOT_CALLED, "experts.w2": NOT_CALLED})),
    "experts called a weight": Case(
        MOE, tensors({"input_linear.weight": normal(4, 96, 64), "router.weight": normal(4, 64)}, "router.weight",
                     refused={"input_linear.weight": "a stack of matrices, or kernels of 64 positions"})),
    "experts with biases": Case(MOE, stacks({"gate_up.weight": (4, 64, 96)}, {"gate_up.bias": (4, 96)}, turned=True)),
    "square experts with biases": Case(
        MOE, tensors({"up.weight": normal(4, 64, 64), "up.bias": normal(4, 64)},
                     refused={"up.weight": "a stack of matrices"})),
    "experts with a fused gate": Case(
        MOE, stacks({"mlp.experts.gate_up": (3, 24, 16), "mlp.experts.down": (3, 16, 12)}, ROUTER)),
    "experts with a fused gate, inputs first": Case(
        MOE, stacks({"mlp.experts.gate_up": (3, 16, 24), "mlp.experts.down": (3, 12, 16)}, ROUTER, turned=True)),
    "experts with a fused gate, the way back square": Case(
        MOE, stacks({"mlp.experts.gate_up": (3, 32, 16), "mlp.experts.down": (3, 16, 16)}, ROUTER)),
    "experts of three matrices": Case(
        MOE, stacks({"mlp.w1": (3, 24, 16), "mlp.v1": (3, 24, 16), "mlp.w2": (3, 16, 24)}, ROUTER)),
    "experts of three matrices, inputs first": Case(
        MOE, stacks({"mlp.w1": (3, 16, 24), "mlp.v1": (3, 16, 24), "mlp.w2": (3, 24, 16)}, ROUTER, turned=True)),
    "experts called weights": Case(
        MOE, stacks({"mlp.input.weight": (3, 24, 16), "mlp.output.weight": (3, 16, 12)}, ROUTER)),
    "experts of three matrices of one shape": Case(
        MOE, tensors({"mlp.w1": normal(3, 24, 16), "mlp.v1": normal(3, 24, 16), "mlp.w2": normal(3, 24, 16),
                      "mlp.router.weight": normal(3, 16)}, "mlp.router.weight",
                     refused=dict.fromkeys(("mlp.w1", "mlp.v1", "mlp.w2"), NOT_CALLED))),
    "a router of another width": Case(
        MOE, tensors({"mlp.up": normal(3, 24, 16), "mlp.down": normal(3, 16, 12), "mlp.router.weight": normal(3, 20)},
                     "mlp.router.weight", refused={"mlp.up": NOT_CALLED, "mlp.down": NOT_CALLED})),
    "a matrix of one row": Case(
        TORCH, tensors({"score.weight": normal(1, 16), "score.bias": torch.zeros(1)}, "score.weight")),
    "names without dots": Case("users", tensors({"weight": normal(4, 8), "bias": torch.zeros(4)}, "weight")),
    "GPT-2": Case(HF, of_transformers(lambda kit: kit.GPT2LMHeadModel(kit.GPT2Config(
        n_embd=32, n_layer=1, n_head=4, vocab_size=50, n_positions=16))), slow=True),
    "Llama": Case(HF, of_transformers(lambda kit: kit.LlamaForCausalLM(kit.LlamaConfig(**llama))), slow=True),
    "Mixtral": Case(HF, of_transformers(lambda kit: kit.MixtralForCausalLM(kit.MixtralConfig(
        **moe, num_local_experts=3))), slow=True),
    "Qwen2-MoE": Case(HF, of_transformers(lambda kit: kit.Qwen2MoeForCausalLM(kit.Qwen2MoeConfig(
        **moe, num_experts=3, moe_intermediate_size=12, shared_expert_intermediate_size=12))), slow=True),
    "gpt-oss": Case(HF, of_transformers(lambda kit: kit.GptOssForCausalLM(kit.GptOssConfig(
        **moe, num_local_experts=3, head_dim=8)), experts="inputs"), slow=True),
    "Granite-MoE": Case(HF, of_transformers(lambda kit: kit.GraniteMoeForCausalLM(kit.GraniteMoeConfig(
        **{**moe, "hidden_size": 64, "intermediate_size": 48}, num_local_experts=3)), experts="outputs"), slow=True),
    "Mamba": Case(HF, of_transformers(lambda kit: kit.MambaForCausalLM(kit.MambaConfig(
        hidden_size=16, num_hidden_layers=1, vocab_size=40, state_size=4, pad_token_id=1))), slow=True),
    "BERT": Case(HF, of_transformers(lambda kit: kit.BertModel(kit.BertConfig(**bert))), slow=True),
    "RoBERTa": Case(HF, of_transformers(lambda kit: kit.RobertaModel(kit.RobertaConfig(**bert))), slow=True),
    "ALBERT": Case(
        HF, of_transformers(lambda kit: kit.AlbertModel(kit.AlbertConfig(**bert, embedding_size=8))), slow=True),
    "DistilBERT": Case(HF, of_transformers(lambda kit: kit.DistilBertModel(kit.DistilBertConfig(
        dim=16, n_layers=1, n_heads=2, hidden_dim=24, vocab_size=40, max_position_embeddings=32))), slow=True),
    "T5": Case(HF, of_transformers(lambda kit: kit.T5ForConditionalGeneration(kit.T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=40))), slow=True),
    "BART": Case(HF, of_transformers(lambda kit: kit.BartForConditionalGeneration(kit.BartConfig(
        **seq, max_position_embeddings=32))), slow=True),
    "Whisper": Case(HF, of_transformers(lambda kit: kit.WhisperForConditionalGeneration(kit.WhisperConfig(
        **seq, num_mel_bins=8, max_source_positions=16, max_target_positions=16, pad_token_id=1, bos_token_id=1,
        eos_token_id=1, decoder_start_token_id=1))), slow=True),
    "Wav2Vec2": Case(HF, of_transformers(lambda kit: kit.Wav2Vec2Model(kit.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8),
        conv_kernel=(3, 3), conv_stride=(2, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2))), slow=True),
    "ViT": Case(HF, of_transformers(lambda kit: kit.ViTModel(kit.ViTConfig(**vision))), slow=True),
    "CLIP": Case(HF, of_transformers(lambda kit: kit.CLIPModel(kit.CLIPConfig(
        text_config={**bert, "vocab_size": 40}, vision_config=vision, projection_dim=8))), slow=True),
    "ConvNeXt": Case(HF, of_transformers(lambda kit: kit.ConvNextModel(kit.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2))), slow=True),
    "OPT": Case(HF, of_transformers(lambda kit: kit.OPTForCausalLM(kit.OPTConfig(
        **small, ffn_dim=24, max_position_embeddings=32, word_embed_proj_dim=16))), slow=True),
    "BLOOM": Case(HF, of_transformers(lambda kit: kit.BloomForCausalLM(kit.BloomConfig(
        hidden_size=16, n_layer=1, n_head=2, vocab_size=40))), slow=True),
    "Gemma": Case(
        HF, of_transformers(lambda kit: kit.GemmaForCausalLM(kit.GemmaConfig(**llama, head_dim=8))), slow=True),
    **{name: Case(TIMM, of_timm(name), slow=True) for name in (
        "resnet10t", "mobilenetv3_small_050", "efficientvit_b0", "repvgg_a0", "convnext_atto", "levit_128s")},
    **{name: Case(TIMM, of_timm(name, img_size=size), slow=True) for name, size in (
        ("vit_tiny_patch16_224", 32), ("test_vit", 64), ("mixer_s32_224", 64))},
}  # fmt: skip
