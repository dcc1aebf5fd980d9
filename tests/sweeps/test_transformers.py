"""Models of transformers, tiny, with random weights: through all of the library, and every verb undone to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded
from foreign import transformers
from gonio import init
from gonio import parametrizations as P
from gonio.errors import NotApplicableError
from gonio.surgery import fold_, generated_example
from sweeps.passage import VERBS, check_verb, walk

TOKENS = torch.arange(20).reshape(2, 10) % 7
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def bert() -> tuple[nn.Module, Any]:
    t = transformers()
    return t.BertModel(t.BertConfig(vocab_size=50, max_position_embeddings=16, **SMALL)), {"input_ids": TOKENS}


def gpt2() -> tuple[nn.Module, Any]:
    t = transformers()
    config = t.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, use_cache=False, **ENDS)
    return t.GPT2LMHeadModel(config), {"input_ids": TOKENS}


def llama() -> tuple[nn.Module, Any]:
    t = transformers()
    more = {"num_key_value_heads": 1, "max_position_embeddings": 16, "use_cache": False, "tie_word_embeddings": True}
    return t.LlamaForCausalLM(t.LlamaConfig(vocab_size=50, **SMALL, **more, **ENDS)), {"input_ids": TOKENS}


def vit() -> tuple[nn.Module, Any]:
    t = transformers()
    config = t.ViTConfig(image_size=16, patch_size=4, num_channels=3, num_labels=4, **SMALL)
    return t.ViTForImageClassification(config), seeded(2, 3, 16, 16)


def t5() -> tuple[nn.Module, Any]:
    t = transformers()
    config = t.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, use_cache=False)
    return t.T5ForConditionalGeneration(config), {"input_ids": TOKENS, "decoder_input_ids": TOKENS}


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama, "vit": vit, "t5": t5}
# What has nothing to act on: no batch norm, no convolution, no layer of torch's class Linear, no positive homogeneity.
REFUSALS = {"calibrate_", "balance_", "fold_", "swap_ norms", "swap_ convolutions"}

Build = Callable[[], tuple[nn.Module, Any]]
every_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


@every_model
def test_measure_convert_train_undo_fold_save_load(build: Build, tmp_path: Path) -> None:
    found = walk("model", build, tmp_path, verbs=False)
    assert not found.failed
    assert set(found.steps.values()) == {"passed"}
    assert found.figures["converted"] > 0


@every_model
def test_every_verb_is_undone_to_the_bit_or_refused(build: Build) -> None:
    model, x = build()
    model.eval()
    outcomes = {verb: check_verb(apply, model, x) for verb, apply in VERBS.items()}
    assert {verb for verb, outcome in outcomes.items() if outcome != "passed"} <= REFUSALS, outcomes


@every_model
def test_an_example_is_made(build: Build) -> None:
    model, _ = build()
    assert gonio.equivalent(model, model, example=generated_example(model)).absolute == 0
    assert gonio.equivalent(model, model).absolute == 0


def rows(weight: Tensor) -> Tensor:
    """Filters of a weight of transformers' Conv1D, which stores inputs first."""
    return weight.detach().T


class TestPackedProjections:
    """GPT-2 keeps query, key and value side by side in one weight of (inputs, outputs)."""

    def test_filters_are_the_columns(self) -> None:
        model, _ = gpt2()
        gonio.parametrize_(model, P.Sphere(), where="*.c_attn")
        norms = rows(model.transformer.h[0].attn.c_attn.weight).norm(dim=1)
        torch.testing.assert_close(norms, torch.ones(48))

    def test_orthogonal_weights_are_orthogonal_as_maps(self) -> None:
        model, _ = gpt2()
        gonio.init_(model, init.orthogonal_, where="*.c_attn", gain=1.0)
        weight = rows(model.transformer.h[1].attn.c_attn.weight)
        torch.testing.assert_close(weight.T @ weight, torch.eye(16), rtol=1e-5, atol=1e-5)

    def test_a_penalty_reads_them_the_same_way(self) -> None:
        model, _ = gpt2()
        penalty = gonio.Penalty(model, [("*.0.attn.c_attn", gonio.regularizers.L2(1.0))])
        torch.testing.assert_close(penalty(), 0.5 * model.transformer.h[0].attn.c_attn.weight.square().sum())


class TestTiedEmbeddings:
    """The language model's head and its embedding are one Parameter."""

    @pytest.mark.parametrize("build", [gpt2, llama, t5])
    def test_they_stay_tied_through_a_round_trip(self, build: Build) -> None:
        model, x = build()
        head, table = model.get_output_embeddings(), model.get_input_embeddings()
        assert head.weight is table.weight
        edited = gonio.parametrize_(model, P.WeightNorm())
        assert torch.equal(head.weight, table.weight)
        folded = fold_(model, example=x)
        assert head.weight is table.weight
        folded.undo_()
        edited.undo_()
        assert head.weight is table.weight

    def test_one_end_alone_cannot_be_parametrized(self) -> None:
        model, _ = llama()
        with pytest.raises(NotApplicableError, match=r"it shares its weight with model.embed_tokens.weight, which is"):
            gonio.parametrize_(model, P.WeightNorm(), where="lm_head")

    def test_they_are_initialised_once(self) -> None:
        model, _ = llama()
        text = str(gonio.init_(model, init.lecun_))
        assert "lm_head  " in text.replace("lm_head ", "lm_head  ")
        assert "tied: initialised above" in text
