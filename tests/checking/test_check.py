"""Planted damages are named, healthy files have no finding above info, and hostile files run no code."""

from __future__ import annotations

import builtins
import errno
import io
import json
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gonio
from catalog import seeded
from cli.shell import invoke
from gonio.errors import GonioError, InvalidArgumentError, RefusedFileError, UnreadableFileError, UnsoundStateError
from gonio.measuring import check_before_save
from measuring.zoo_files import FILES

State = dict[str, Tensor]


def state(seed: int = 0, dtype: torch.dtype = torch.float32) -> State:
    draw = torch.Generator().manual_seed(seed)
    made = {f"layers.{i}.down.weight": torch.randn(24, 40, generator=draw) for i in range(6)}
    made["norm.bias"] = torch.randn(40, generator=draw)
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def found(source: Any, **options: Any) -> set[tuple[str, str]]:
    return {(f.code, f.path) for f in gonio.check(source, **options).findings}


def rewritten(path: Path, change: Callable[[dict[str, Any]], object], data: bytes = b"") -> None:
    """The file with a changed header and more data."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :] + data)


def sharded(folder: Path, tensors: State) -> Path:
    names = list(tensors)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / part)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: part for part, held in parts.items() for name in held}}))
    return index


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_has_its_place(dtype: torch.dtype, bad: float) -> None:
    tensors = state(dtype=dtype)
    tensors["layers.2.down.weight"][3, 7] = bad
    row = gonio.check(tensors)["layers.2.down"]
    assert (row.nonfinite, row.first_nonfinite) == (1, (3, 7))
    assert found(tensors) == {("G001", "layers.2.down")}


@pytest.mark.parametrize("shape", [(), (5,), (7, 3), (3, 300_000), (40, 3, 3, 3), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_norm_and_largest_entry_against_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    row = gonio.check({"w": tensor})["w"]
    if not tensor.numel():
        assert row.norm is None
        return
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
    assert row.norm == pytest.approx(float(values.square().sum().sqrt()), rel=1e-5)
    assert row.largest == float(values.abs().max())


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_neither_overflow_nor_vanish(scale: float) -> None:
    assert gonio.check({"w": torch.full((9,), scale)})["w"].norm == pytest.approx(3 * scale, rel=1e-6)


def zero_rows(tensors: State) -> None:
    tensors["layers.1.down.weight"][4:9] = 0


def equal_rows(tensors: State) -> None:
    tensors["layers.1.down.weight"][4] = tensors["layers.1.down.weight"][9]


def constant_row(tensors: State) -> None:
    tensors["layers.1.down.weight"][4] = 0.5


def scaled(tensors: State) -> None:
    tensors["layers.1.down.weight"] *= 100


def zeroed(tensors: State) -> None:
    tensors["layers.1.down.weight"].zero_()


@pytest.mark.parametrize(
    ("damage", "code"),
    [(zero_rows, "G102"), (equal_rows, "G203"), (constant_row, "G708"), (scaled, "G709"), (zeroed, "G709")],
)
def test_planted_values(damage: Callable[[State], None], code: str) -> None:
    tensors = state()
    damage(tensors)
    assert found(tensors) == {(code, "layers.1.down")}


def blocks(count: int) -> State:
    names = ("q.weight", "k.weight", "v.weight", "o.weight", "norm.weight")
    return {f"h.{n}.{name}": seeded(8, 16, seed=n) for n in range(count) for name in names}


@pytest.mark.parametrize("lost", [("h.2.k.weight",), ("h.1.k.weight", "h.1.norm.weight")])
def test_a_block_that_lacks_what_all_others_have_is_named(lost: tuple[str, ...], tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in blocks(5).items() if name not in lost}
    assert found(tensors) == {("G714", name) for name in lost}
    save_file(tensors, tmp_path / "model.safetensors")
    measured = gonio.measure(tmp_path / "model.safetensors")
    assert {(each.code, each.path) for each in measured.findings} == {("G714", name) for name in lost}


@pytest.mark.parametrize(
    ("count", "lost"),
    [
        (3, ("h.1.k.weight",)),  # too few blocks
        (5, ("h.0.k.weight",)),  # the first and the last often differ
        (5, ("h.4.k.weight",)),
        (5, ("h.1.k.weight", "h.3.k.weight")),  # two kinds of blocks
        (5, ("h.2.q.weight", "h.2.k.weight", "h.2.v.weight")),  # another kind of block
    ],
)
def test_blocks_that_are_built_in_other_ways_lack_nothing(count: int, lost: tuple[str, ...]) -> None:
    assert not found({name: tensor for name, tensor in blocks(count).items() if name not in lost})


@pytest.mark.parametrize("block", [0, 2, 4])
def test_a_matrix_that_one_block_stores_transposed_is_named(block: int, tmp_path: Path) -> None:
    name = f"h.{block}.up.weight"
    tensors = blocks(5) | {f"h.{each}.up.weight": seeded(24, 16, seed=each) for each in range(5)}
    assert not found(tensors)
    tensors[name] = tensors[name].T.contiguous()
    assert found(tensors) == {("G714", name)}
    save_file(tensors, tmp_path / "model.safetensors")
    measured = gonio.measure(tmp_path / "model.safetensors").findings
    said = "it is 16×24, and transposed in 4 blocks like it"
    assert [(each.path, each.found) for each in measured if each.code == "G714"] == [(name, said)]


@pytest.mark.parametrize(
    "shapes",
    [
        [(24, 16)] * 2 + [(16, 24)],  # too few blocks
        [(24, 16)] * 3 + [(16, 24)] * 2,  # every second one
        [(24, 16)] * 4 + [(20, 16)],  # pruned
        [(24, 16)] * 3 + [(20, 16), (16, 24)],  # of several sizes
    ],
)
def test_blocks_of_other_shapes_are_not_called_transposed(shapes: list[tuple[int, int]]) -> None:
    ups = {f"h.{each}.up.weight": seeded(*shape, seed=each) for each, shape in enumerate(shapes)}
    assert not {each for each in found(blocks(len(shapes)) | ups) if each[0] == "G714"}


@pytest.mark.parametrize(
    ("kept", "config", "codes"),
    [
        ({0, 1, 2, 3}, {"num_hidden_layers": 4}, set()),
        ({0, 1, 2}, {"num_hidden_layers": 4}, {"G717"}),  # the last one
        ({0, 1, 3}, {"num_hidden_layers": 4}, {"G717"}),  # one between others
        ({0, 1, 2}, {"text_config": {"num_hidden_layers": 4}}, {"G717"}),
        ({0, 1, 2}, {"num_hidden_layers": 4, "num_attention_heads": None}, set()),  # not a model of attention
        ({0, 1, 2}, {}, set()),
        ({0}, {"num_hidden_layers": 4}, set()),  # one block that runs four times
        ({0, 1, 2, 3, 4}, {"num_hidden_layers": 4}, set()),  # one more, for later tokens
    ],
)
def test_blocks_are_counted_beside_a_configuration(
    kept: set[int], config: dict[str, object], codes: set[str], tmp_path: Path
) -> None:
    tensors = {name: tensor for name, tensor in blocks(5).items() if int(name.split(".")[1]) in kept}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2, **config}))
    assert {each.code for each in gonio.check(tmp_path).findings} == codes
    measured = gonio.measure(tmp_path).findings
    said = f"{len(kept)} blocks, and the configuration states 4"
    assert [(each.path, each.found) for each in measured if each.code == "G717"] == ([("h", said)] if codes else [])


LACKS = "1 table of 50 tokens, and the configuration states 2"


@pytest.mark.parametrize(
    ("tables", "config", "found"),
    [
        (("embed", "head"), {"tie_word_embeddings": False}, ()),
        (("embed",), {"tie_word_embeddings": False}, ("embed.weight", LACKS)),
        (("head",), {"tie_word_embeddings": False}, ("head.weight", LACKS)),
        (("embed",), {"tie_word_embeddings": True}, ()),
        (("embed",), {}, ()),  # not said
        ((), {}, ("", "0 tables of 50 tokens, and the configuration states 1")),
        (("embed",), {"vocab_size": 64}, ("", "0 tables of 64 tokens, and the configuration states 1")),
        (("embed",), {"vocab_size": 40, "tie_word_embeddings": True}, ()),  # with rows for other tokens
        (("embed",), {"tie_word_embeddings": False, "architectures": ["BaseModel"]}, ()),
        (("embed",), {"tie_word_embeddings": False, "vocab_size": None}, ()),
    ],
)
def test_tables_of_tokens_are_counted_beside_a_configuration(
    tables: tuple[str, ...], config: dict[str, object], found: tuple[str, str], tmp_path: Path
) -> None:
    tensors = {f"{table}.weight": seeded(50, 8, seed=seed) for seed, table in enumerate(tables)}
    save_file({**blocks(2), **tensors}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50, "architectures": ["AForCausalLM"], **config}))
    expected = [found] if found else []
    for told in (gonio.check(tmp_path), gonio.measure(tmp_path)):
        assert [(each.path, each.found) for each in told.findings if each.code == "G717"] == expected


CAUSAL = {"num_attention_heads": 2, "architectures": ["AForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "more", "named"),
    [
        ({"num_hidden_layers": 4}, (), True),
        ({"num_hidden_layers": 5}, (), False),
        ({"num_hidden_layers": 4, "decoder_layers": 5}, (), False),  # of another list, which is stated too
        ({"num_hidden_layers": 4, "layer_types": ["full"] * 5}, (), False),
        ({"num_hidden_layers": 4, "num_experts": 5}, (), True),
        ({"num_hidden_layers": 4}, ("h.4.eh_proj.weight",), False),  # for later tokens, as DeepSeek-V3 has it
        ({"num_hidden_layers": 4, "architectures": ["AModel"]}, (), False),
    ],
)
def test_more_blocks_than_stated(config: dict[str, object], more: tuple[str, ...], named: bool, tmp_path: Path) -> None:
    tensors = blocks(5) | {name: seeded(8, 16, seed=99) for name in more}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**CAUSAL, **config}))
    expected = [("h", "5 blocks, and the configuration states 4")] if named else []
    for told in (gonio.check(tmp_path), gonio.measure(tmp_path)):
        assert [(each.path, each.found) for each in told.findings if each.code == "G717"] == expected


@pytest.mark.parametrize(
    ("head", "config", "named"),
    [
        (seeded(50, 8, seed=1), {"tie_word_embeddings": True}, True),
        (seeded(50, 8, seed=0), {"tie_word_embeddings": True}, False),  # one table, saved twice
        (seeded(50, 8, seed=1), {"tie_word_embeddings": False}, False),
        (seeded(50, 8, seed=1), {}, False),  # not said
        (seeded(50, 8, seed=1), {"tie_word_embeddings": True, "quantization": {"bits": 4}}, False),
        (seeded(50, 8, seed=0).double(), {"tie_word_embeddings": True}, False),  # not compared
        (seeded(50, 9, seed=1), {"tie_word_embeddings": True}, False),  # another table
        (seeded(50, 8, seed=1), {"tie_word_embeddings": True, "architectures": ["AModel"]}, False),
    ],
)
def test_two_tables_of_tokens_where_one_is_stated(
    head: torch.Tensor, config: dict[str, object], named: bool, tmp_path: Path
) -> None:
    save_file({"embed.weight": seeded(50, 8, seed=0), "head.weight": head}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**CAUSAL, "vocab_size": 50, **config}))
    said = "it differs from embed.weight, and the configuration states that both are one"
    told = [(each.path, each.found) for each in gonio.check(tmp_path).findings if each.code == "G717"]
    assert told == ([("head.weight", said)] if named else [])


@pytest.mark.parametrize(
    ("before", "part"),
    [
        ("_orig_mod.{name}", "_orig_mod"),
        ("module.{name}", "module"),
        ("base_model.model.{name}", "base_model.model"),
        ("a._fsdp_wrapped_module.{name}", "_fsdp_wrapped_module"),
        ("a._checkpoint_wrapped_module.{name}", "_checkpoint_wrapped_module"),
    ],
)
def test_names_of_wrappers_beside_a_configuration_of_transformers(before: str, part: str, tmp_path: Path) -> None:
    names = {before.format(name=name): tensor for name, tensor in blocks(2).items()}
    save_file(names, tmp_path / "model.safetensors")
    said = f"{part} in the names of 10 of 10 tensors, which the model does not have: {next(iter(sorted(names)))}"
    for config, expected in ((CAUSAL, [("", said)]), ({"model_type": "own"}, [])):
        (tmp_path / "config.json").write_text(json.dumps(config))
        for told in (gonio.check(tmp_path), gonio.measure(tmp_path)):
            assert [(each.path, each.found) for each in told.findings if each.code == "G718"] == expected
    inner = {"h.base_layer.weight": seeded(8, 16), "h.base_layer.bias": seeded(8)}
    save_file({**inner, "h.norm.weight": seeded(8, seed=1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CAUSAL))
    told = [each.found for each in gonio.check(tmp_path).findings if each.code == "G718"]
    assert told == [
        "base_layer in the names of 2 of 3 tensors, which the model does not have: h.base_layer.bias",
    ]
    some = {"module.h.weight": seeded(8, 16), "base_layer.0.weight": seeded(8, 16, seed=1)}  # as DLA has
    save_file(some, tmp_path / "model.safetensors")
    assert "G718" not in {each.code for each in gonio.check(tmp_path).findings}


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        ((0, 1, 3, 4), ["h.2"]),
        ((0, 1, 2, 4), ["h.3"]),
        ((0, 1, 2, 3), []),
        ((0, 2, 3), []),  # too few
        ((0, 2, 4, 6), []),  # every second one is of a layer without tensors
        ((0, 1, 4, 5), []),
    ],
)
def test_a_block_that_is_missing_between_others(kept: tuple[int, ...], named: list[str], tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in blocks(7).items() if int(name.split(".")[1]) in kept}
    save_file(tensors, tmp_path / "model.safetensors")
    for told in (gonio.check(tensors), gonio.measure(tmp_path)):
        assert [each.path for each in told.findings if each.code == "G714"] == named
    tensors = {name: tensor for name, tensor in tensors.items() if name != "h.0.q.weight"}
    assert "G714" not in {each.code for each in gonio.check(tensors).findings}  # blocks of two kinds


def test_the_blocks_of_one_part_of_a_model_are_not_counted(tmp_path: Path) -> None:
    part = tmp_path / "model-00001-of-00002.safetensors"
    save_file(blocks(3), part)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2, "num_hidden_layers": 4}')
    assert not gonio.check(part).findings
    assert {each.code for each in gonio.check(tmp_path).findings} >= {"G702"}


@pytest.mark.parametrize("content", ["", '{"model_type": "llama", "hid', "\x00" * 64, "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_a_configuration_that_cannot_be_read_is_named(name: str, content: str, tmp_path: Path) -> None:
    save_file(blocks(2), tmp_path / "model.safetensors")
    assert gonio.check(tmp_path).intact
    (tmp_path / name).write_text(content)
    assert {(each.code, each.path) for each in gonio.check(tmp_path).findings} == {("G701", name)}
    assert {(each.code, each.path) for each in gonio.measure(tmp_path).findings} == {("G701", name)}


@pytest.mark.parametrize("reader", [gonio.check, gonio.measure])
@pytest.mark.parametrize("name", ["b.safetensors", "config.json"])
def test_a_file_that_the_system_does_not_read_is_not_called_damaged(
    reader: Callable[[Path], object], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded(tmp_path, blocks(2))
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    opened = io.open

    def refused(file: str | Path, *args: Any, **kwargs: Any) -> Any:
        if str(file).endswith(name):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return opened(file, *args, **kwargs)

    reader(tmp_path)
    for module in (io, builtins):
        monkeypatch.setattr(module, "open", refused)
    with pytest.raises(RefusedFileError, match=rf"{name}.*cannot be read; the system refuses it.*the permissions"):
        reader(tmp_path)


@pytest.mark.parametrize("word", [".", "./", "../kept"])
def test_a_folder_is_called_by_its_name(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is kept says of what it is."""
    folder = tmp_path / "kept"
    folder.mkdir()
    save_file(blocks(2), folder / "model.safetensors")
    monkeypatch.chdir(folder)
    for found in (gonio.check(word), gonio.measure(word)):
        assert found.source == (word if word.strip("./") else "kept")


def test_a_page_tells_facts_from_figures_with_a_level_of_chance(tmp_path: Path) -> None:
    tensors = blocks(3)
    tensors["h.1.q.weight"] = tensors["h.1.q.weight"][:1].expand(8, -1).clone()  # one direction
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2, "num_hidden_layers": 4}')
    page = gonio.measure(tmp_path).to_html()
    assert "Never by chance: names and shapes are counted" in page
    assert "By chance: mean squared cosine" in page


STANDING_IN = {
    "version https://git-lfs.github.com/spec/v1\noid sha256:0\n": "it is a pointer of Git LFS, not the file itself",
    "<!DOCTYPE html><html></html>": "it is a page of HTML, as a server sends instead of a file",
}


@pytest.mark.parametrize(("content", "said"), STANDING_IN.items(), ids=["pointer", "page"])
def test_what_came_in_the_place_of_a_configuration_is_said(content: str, said: str, tmp_path: Path) -> None:
    save_file(blocks(2), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(content)
    assert [each.found for each in gonio.check(tmp_path).findings] == [said]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(UnreadableFileError, match=said):
        gonio.check(index)


@pytest.mark.parametrize(("kernels", "lacks"), [((4, 2, 1, 3), False), ((3, 3, 1, 3), True)])
def test_a_step_of_a_pyramid_that_keeps_its_size_lacks_no_kernel(kernels: tuple[int, ...], lacks: bool) -> None:
    """Its neighbours have kernels of different sizes; where these are equal, theirs is the same layer."""
    tensors = {}
    for block, size in enumerate(kernels):
        for part in ("a", "b"):
            tensors |= {f"h.{block}.{part}.weight": seeded(8, 8), f"h.{block}.{part}.bias": seeded(8)}
        if block != 2:
            tensors |= {f"h.{block}.resize.weight": seeded(8, 8, size, size), f"h.{block}.resize.bias": seeded(8)}
    lost = {("G714", "h.2.resize.weight"), ("G714", "h.2.resize.bias")}
    assert found(tensors) == (lost if lacks else set())


def layers(count: int, names: Sequence[str] = ("up.weight", "down.weight")) -> State:
    return {f"h.{n}.{name}": seeded(8, 16, seed=10 * n + k) for n in range(count) for k, name in enumerate(names)}


def copy_layer(tensors: State, layer: int, of: int, names: Sequence[str] = ("up.weight", "down.weight")) -> None:
    for name in names:
        tensors[f"h.{layer}.{name}"] = tensors[f"h.{of}.{name}"].clone()


def test_a_layer_that_is_the_copy_of_another_is_named(tmp_path: Path) -> None:
    tensors = layers(12)
    copy_layer(tensors, 10, 2)
    assert found(tensors) == {("G716", "h.10")}
    save_file(tensors, tmp_path / "model.safetensors")
    assert [finding.found for finding in gonio.check(tmp_path / "model.safetensors").findings] == [
        "2 tensors equal those of h.2 to the last bit: h.10.down.weight, h.10.up.weight"
    ]
    tensors["h.10.up.weight"][3, 3] += 1
    assert found(tensors) == {("G716", "h.10")}  # one copy alone in its family
    tensors["h.10.down.weight"][3, 3] += 1
    assert not found(tensors)


def test_half_of_a_model_in_the_place_of_the_other_half_is_named() -> None:
    tensors = layers(6)
    for number in range(3):
        copy_layer(tensors, number + 3, number)
    assert found(tensors) == {("G716", f"h.{number}") for number in (3, 4, 5)}


def test_one_expert_that_is_the_copy_of_another_is_named() -> None:
    experts = [f"experts.{k}.weight" for k in range(4)]
    tensors = layers(3, experts)
    tensors["h.1.experts.2.weight"] = tensors["h.1.experts.0.weight"].clone()
    assert found(tensors) == {("G716", "h.1.experts.2")}


def clones(tensors: State) -> None:
    """Layers at their start, which torch clones."""
    for number in range(1, 6):
        copy_layer(tensors, number, 0)


def cloned_experts(tensors: State) -> None:
    for layer in range(6):
        tensors |= {f"h.{layer}.experts.{k}.weight": seeded(8, 16, seed=layer) for k in range(4)}


def tables(tensors: State) -> None:
    """Angles of positions: of each second layer the same."""
    tensors |= {f"h.{layer}.angles": seeded(8, 16, seed=layer % 2) for layer in range(6)}


def shared(tensors: State) -> None:
    tensors |= {f"h.4.{name}.weight": tensors[f"h.1.{name}.weight"] for name in ("up", "down")}


def constant(tensors: State) -> None:
    tensors |= {f"h.{layer}.gain": torch.full((8, 16), 1.0 if layer else 2.0) for layer in range(6)}


@pytest.mark.parametrize("change", [clones, cloned_experts, tables, shared, constant])
def test_layers_that_are_alike_for_a_reason_are_no_copies(change: Callable[[State], None]) -> None:
    tensors = layers(6)
    change(tensors)
    assert "G716" not in {code for code, _ in found(tensors)}


def trained_blocks(count: int = 5) -> State:
    """Blocks of a network as training leaves them: no gain, bias or statistic is 0."""
    draw = torch.Generator().manual_seed(0)
    state: State = {}
    for block in range(count):
        state[f"blocks.{block}.fc.weight"] = torch.randn(32, 32, generator=draw)
        state[f"blocks.{block}.fc.bias"] = torch.randn(32, generator=draw) / 10
        state[f"blocks.{block}.norm.weight"] = torch.rand(32, generator=draw) + 0.5
        state[f"blocks.{block}.norm.running_var"] = torch.rand(32, generator=draw) + 0.5
        state[f"blocks.{block}.gate"] = torch.rand((), generator=draw) + 0.5
    return state


@pytest.mark.parametrize(
    ("name", "code"), [("norm.weight", "G709"), ("fc.bias", "G709"), ("norm.running_var", "G107"), ("gate", None)]
)
def test_a_vector_that_is_zero_beside_others_that_are_not_is_named(name: str, code: str | None) -> None:
    assert gonio.check(trained_blocks()).findings == ()
    state = trained_blocks()
    state[f"blocks.2.{name}"].zero_()
    found = [(f.code, f.path.removesuffix(".weight")) for f in gonio.check(state).findings]
    assert found == ([] if code is None else [(code, f"blocks.2.{name}".removesuffix(".weight"))])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_entry_with_a_fault_in_its_exponent_is_named(dtype: torch.dtype) -> None:
    tensors = state(dtype=dtype)
    assert found(tensors) == set()
    alone = {"fc.weight": seeded(20, 30, dtype=dtype), "fc.bias": seeded(20, dtype=dtype)}
    for held, name in ((tensors, "layers.2.down"), (alone, "fc")):
        held[f"{name}.weight"][3, 7] = 0.9 * torch.finfo(torch.float16).max
        ((code, path, said),) = [(f.code, f.path, f.found) for f in gonio.check(held).findings]
        assert (code, path) == ("G721", name)
        assert said.endswith("is more than 10,000 times the root mean square of the others")


@pytest.mark.parametrize("large", [1e160, 1e307])
def test_squares_and_ratios_that_float64_cannot_hold(large: float) -> None:
    tensors = state(dtype=torch.float64)
    tensors |= {f"layers.{i}.down.bias": 1e-9 * seeded(24, seed=i, dtype=torch.float64) for i in range(6)}
    tensors["alone"] = seeded(20, 30, dtype=torch.float64)
    for name in ("layers.2.down.weight", "layers.3.down.bias", "alone"):
        tensors[name].view(-1)[5] = large
    result = gonio.check(tensors)
    assert {(f.code, f.path) for f in result.findings} == {
        ("G721", "layers.2.down"), ("G709", "layers.3.down.bias"), ("G721", "alone"),
    }  # fmt: skip
    assert result["alone"].norm == pytest.approx(large)
    json.dumps(result.to_dict(), allow_nan=False)
    tiny = gonio.check({"w": torch.full((4, 9), 1e-200, dtype=torch.float64)})["w"]
    assert tiny.norm == pytest.approx(6e-200)
    assert "G709" in {finding.code for finding in gonio.measure(tensors).findings}


@pytest.mark.parametrize("held", [
    {"w": torch.full((20, 30), 1e-9).index_put((torch.tensor(3), torch.tensor(7)), torch.tensor(50.0))},
    {"w": seeded(20, 30).mul_(3.0).index_put((torch.tensor(3), torch.tensor(7)), torch.tensor(9e3))},
    {"w": torch.eye(2).mul_(1e6)},
    {"steps": torch.zeros(30).index_put((torch.tensor([3]),), torch.tensor(1e6))},
], ids=["decayed", "super weight", "few", "vector"])  # fmt: skip
def test_a_large_entry_that_training_can_leave_is_not_named(held: State) -> None:
    assert "G721" not in {code for code, _ in found(held)}


VAST = ["norm.weight", "fc.bias", "norm.running_var"]


@pytest.mark.parametrize("name", VAST)
@pytest.mark.parametrize("change", ["one", "all"])
def test_a_vector_with_a_fault_in_an_exponent_is_named(name: str, change: str) -> None:
    state = trained_blocks()
    vector = state[f"blocks.2.{name}"]
    (vector[5:6] if change == "one" else vector).mul_(2.0**64)
    assert found(state) >= {("G709", f"blocks.2.{name}".removesuffix(".weight"))}


@pytest.mark.parametrize("name", VAST)
def test_a_vector_that_training_makes_large_is_not_named(name: str) -> None:
    state = trained_blocks()
    state[f"blocks.2.{name}"].mul_(1e3)  # as gains and outliers of biases
    state["blocks.0.norm.running_var"].mul_(1e6)  # of pixels of 0 to 255 and more, and of samples of sound
    for block in (1, 3, 4):
        state[f"blocks.{block}.fc.bias"].mul_(1e-20)  # that decays because a norm follows
    assert found(state) == set()


@pytest.mark.parametrize(("count", "zeros"), [(5, (1, 2)), (5, range(5)), (3, (2,))])
def test_vectors_of_which_several_are_zero_or_few_are_known_are_not_named(count: int, zeros: Sequence[int]) -> None:
    state = trained_blocks(count)
    for block in zeros:
        state[f"blocks.{block}.norm.weight"].zero_()
    assert gonio.check(state).findings == ()


def test_a_negative_running_variance_is_an_error() -> None:
    norm = nn.BatchNorm2d(4)
    assert not found(norm.state_dict())
    norm.running_var[2] = -0.1
    assert found(norm.state_dict()) == {("G105", "running_var")}
    assert not found({"shift": -torch.ones(4)})


def test_a_tensor_that_is_cut_off_is_told_once(tmp_path: Path) -> None:
    save_file(blocks(2), tmp_path / "model.safetensors")
    raw = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(raw[:-700])
    codes = [(each.code, each.path) for each in gonio.check(tmp_path / "model.safetensors").findings]
    assert {code for code, _ in codes} == {"G704"}
    assert len({path for _, path in codes}) == len(codes)


def test_every_changed_bit_is_found_against_fingerprints() -> None:
    tensors = state()
    before = gonio.check(tensors).fingerprints
    assert not found(tensors, against=before)
    for bit in (0, 15, 31):
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed["norm.bias"].view(torch.int32)[17] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert found(changed, against=before) == {("G710", "norm.bias")}
    changed = tensors | {"new": torch.ones(2)}
    del changed["norm.bias"]
    assert found(changed, against=before) == {("G710", "new"), ("G710", "norm.bias")}
    flipped = {name: tensor.clone() for name, tensor in tensors.items()}
    flipped["norm.bias"][[1, 3]] *= -1  # the highest bits of two words
    assert found(flipped, against=before) == {("G710", "norm.bias")}


def test_the_fingerprint_is_the_same_in_every_version() -> None:
    assert gonio.check({"w": torch.arange(12.0).view(3, 4)})["w"].fingerprint == "48945cfac4405f72"


def test_one_file_shards_and_a_torch_file_are_equal(tmp_path: Path) -> None:
    tensors = state()
    save_file(tensors, tmp_path / "one.safetensors")
    torch.save({"model": tensors, "optimizer": {"m": torch.ones(3)}}, tmp_path / "one.pt")
    (tmp_path / "sharded").mkdir()
    sources = [tmp_path / "one.safetensors", sharded(tmp_path / "sharded", tensors), tmp_path / "one.pt", tensors]
    for jobs in (1, 2):
        kept = [gonio.check(source, jobs=jobs) for source in sources]
        rows = [{t.name: (t.fingerprint, t.norm, t.largest, t.ratio) for t in k.tensors if not t.beside} for k in kept]
        assert all(row == rows[0] for row in rows)
        assert all(k.intact for k in kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(1111, 1003), (3, 300_001)])
def test_values_of_many_chunks_are_those_of_float64_with_any_number_of_threads(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Rows of odd lengths begin at any address, and one chunk has squares that float32 does not hold."""
    tensors = {name: seeded(*shape, seed=seed).to(dtype) for seed, name in enumerate(("w", "other"))}
    flat, (at, big, lost) = tensors["w"].view(-1), (40, 700_000, 400_000)
    flat[at], flat[big] = 0.0, 1e17 if torch.finfo(dtype).max > 1e17 else 200.0
    flat[[lost, lost + 99]] = torch.nan
    expected = flat.double().nan_to_num(0.0)
    checks = [gonio.check(tensors, jobs=jobs) for jobs in (1, 2)]
    assert checks[0].tensors == checks[1].tensors
    one, other = checks[0]["w"], checks[0]["other"]
    assert (one.nonfinite, one.first_nonfinite) == (2, divmod(lost, shape[1]))
    assert one.largest == float(expected.abs().max())
    # sums of up to 2^17 squares in float32
    assert one.norm == pytest.approx(float(expected.norm()), rel=1e-5)
    assert other.norm == pytest.approx(float(tensors["other"].double().norm()), rel=1e-5)


def test_damaged_places(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    cases: list[tuple[Callable[[dict[str, Any]], object], bytes, str]] = [
        (
            lambda h: h["layers.1.down.weight"].update(data_offsets=h["layers.0.down.weight"]["data_offsets"]),
            b"",
            "G704",
        ),
        (lambda h: h["layers.1.down.weight"].update(dtype="F16"), b"", "G704"),
        (lambda h: h["layers.1.down.weight"].update(shape=[24, 41]), b"", "G704"),
        (lambda h: h.pop("layers.1.down.weight"), b"", "G705"),
        (lambda h: None, b"\0" * 12, "G705"),
    ]
    for change, data, code in cases:
        save_file(state(), path)
        rewritten(path, change, data)
        assert code in {f.code for f in gonio.check(path).findings}
    save_file(state(), path)
    path.write_bytes(path.read_bytes()[:-100])
    cut = gonio.check(path)
    assert [(f.code, f.path, "cut off" in f.found) for f in cut.findings] == [("G704", path.name, True)]
    assert cut.verdict == "Damaged: 1 error."


def test_a_shard_that_is_cut_off_is_one_finding_of_its_file(tmp_path: Path) -> None:
    index = sharded(tmp_path, state())
    b = tmp_path / "b.safetensors"
    held, whole = load_file(b), b.stat().st_size
    b.write_bytes(b.read_bytes()[: whole // 3])
    found = gonio.check(index)
    lost = [t.name for t in found.tensors if t.reason]
    assert 1 < len(lost) <= len(held)
    assert set(lost) <= set(held)
    (finding,) = found.findings
    assert (finding.code, finding.path) == ("G704", b.name)
    assert f"{whole // 3:,} of {whole:,} bytes are there, without the end of {len(lost)} tensors" in finding.found
    assert [f["path"] for f in found.to_dict()["findings"]] == [b.name]
    assert "cut off" in found.tensors[[t.name for t in found.tensors].index(lost[0])].reason


def test_shards_against_the_index(tmp_path: Path) -> None:
    index = sharded(tmp_path, state())
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    content = json.loads(index.read_text())
    content["weight_map"]["gone"] = "a.safetensors"
    index.write_text(json.dumps(content))
    assert found(index) == {("G702", "gone")}
    index = sharded(tmp_path, state())
    kept = a.read_bytes(), b.read_bytes()
    a.write_bytes(kept[1]), b.write_bytes(kept[0])  # swapped
    assert {code for code, _ in found(index)} == {"G702"}
    a.write_bytes(kept[0])
    assert ("G703", "layers.0.down.weight") in found(index)
    b.unlink()
    assert ("G702", "b.safetensors") in found(index)
    b.write_bytes(b"\xff" * 50)
    assert ("G701", "b.safetensors") in found(index)


def test_a_flipped_bit_in_a_torch_file(tmp_path: Path) -> None:
    path, tensors = tmp_path / "m.pt", state()
    torch.save(tensors, path)
    raw = bytearray(path.read_bytes())
    raw[raw.index(tensors["norm.bias"].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(raw)
    assert found(path) == {("G711", "m.pt")}


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file(name: str, tmp_path: Path) -> None:
    with suppress(GonioError, OSError):
        str(gonio.check(FILES[name][0](tmp_path)))
    assert not (tmp_path / "canary").exists()


def test_before_saving() -> None:
    bad = {"w": torch.tensor([1.0, torch.nan])}
    with pytest.raises(UnsoundStateError, match="the state dict was not saved; G001 in w"):
        check_before_save(bad)
    with pytest.warns(UserWarning, match="that is saved has findings: G001 in w"):
        check_before_save(bad, action="warn")
    assert check_before_save(nn.Linear(3, 3).state_dict()).intact
    with pytest.raises(InvalidArgumentError, match=r"has the level info, warn or error; found 'warning'"):
        check_before_save({"w": torch.ones(2)}, fail_on="warning")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"check_before_save\(action=\) takes raise or warn"):
        check_before_save(bad, action="no")  # type: ignore[arg-type]


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"check\(\) takes a path or a state dict"):
        gonio.check(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"check\(jobs=\) takes a number of threads"):
        gonio.check({}, jobs=0)
    with pytest.raises(UnreadableFileError, match="it holds no fingerprints"):
        gonio.check({}, against={"schema": "other"})
    with pytest.raises(UnreadableFileError, match="Write it by gonio check --save"):
        gonio.check({}, against=tmp_path / "none.json")


def test_the_command(tmp_path: Path) -> None:
    path, prints, tensors = tmp_path / "m.safetensors", tmp_path / "f.json", state()
    save_file(tensors, path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 6, "num_attention_heads": 4}')
    done = invoke("check", path, "--save", prints)
    assert done.exit_code == 0
    assert done.stdout.startswith("Intact: 7 tensors are there")
    assert "llama, 5,800 values" in done.stdout
    assert "6 layers, 4 heads" in done.stdout
    tensors["norm.bias"][0] += 1
    save_file(tensors, path)
    done = invoke("check", path, "--against", prints)
    assert done.exit_code == 1
    assert "G710" in done.stdout
    assert json.loads(invoke("check", path, "--json", "-").stdout)["intact"]
    path.write_bytes(b"\1")
    assert invoke("check", path).exit_code == 3
    assert invoke("check", path, path, "--save", prints).exit_code == 2


def test_lazy_and_quantised_tensors_are_named_or_checked_by_their_numbers() -> None:
    found = {
        row.name: row.reason
        for row in gonio.check(nn.Sequential(nn.LazyLinear(3), nn.Linear(2, 2)).state_dict()).tensors
    }
    assert found["0.weight"] == "a lazy layer that has seen no input yet"

    class Wide(torch.Tensor):
        def dequantize(self) -> torch.Tensor:
            return torch.full((3, 2), torch.nan)

    broken = gonio.check({"w.weight": torch.ones(3, 2).as_subclass(Wide)})
    assert [f.code for f in broken.findings][:1] == ["G001"]


@pytest.mark.parametrize("said", ["no kernel claims this layout", "no kernel for this layout"])
def test_the_words_of_another_library_decide_nothing(said: str) -> None:
    class Odd(torch.Tensor):
        def dequantize(self) -> torch.Tensor:
            raise NotImplementedError(said)

    found = gonio.check({"w.weight": torch.ones(3, 2).as_subclass(Odd)})
    assert "G704" not in {f.code for f in found.findings}
    assert said in found["w"].reason
    expanded = gonio.check({"w.weight": torch.ones(1).expand(1 << 20, 1 << 10)})
    assert [f.code for f in expanded.findings] == ["G704"]


@pytest.mark.parametrize(
    ("file", "content", "method"),
    [
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ("config.json", {"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ("config.json", {"quantization": {"bits": 4, "group_size": 64}}, "unnamed"),  # of MLX
        ("quantize_config.json", {"bits": 4}, "unnamed"),
        ("config.json", {"quantization": None}, ""),
    ],
)
def test_the_quantisation_is_that_which_measure_reads(
    file: str, content: dict[str, Any], method: str, tmp_path: Path
) -> None:
    save_file({"a.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / file).write_text(json.dumps(content))
    assert gonio.check(tmp_path).contents.quantisation == method


def test_an_expanded_tensor_in_a_file_is_checked_as_what_it_stands_for(tmp_path: Path) -> None:
    table = torch.arange(40.0).expand(12, 3, 40)
    torch.save({"table": table, **state()}, tmp_path / "model.pt")
    checked = gonio.check(tmp_path / "model.pt")
    assert checked.intact
    assert checked["table"].norm == pytest.approx(float(table.double().norm()))
    assert checked["table"].fingerprint == gonio.check({"table": table.clone()})["table"].fingerprint


def test_tied_tensors_keep_their_own_names() -> None:
    tied = torch.randn(4, 4)
    names = {
        row.name
        for row in gonio.check({"model": {"a.weight": tied, "b.weight": tied}, "ema": {"a.weight": tied}}).tensors
    }
    assert names == {"a.weight", "b.weight", "ema.a.weight"}


def test_the_text_says_what_a_finding_is_and_what_to_do() -> None:
    tensors = state()
    next(iter(tensors.values())).view(-1)[0] = torch.nan
    said = " ".join(str(gonio.check(tensors)).split())
    assert "error G001: " in said
    assert " is NaN or infinite, the first at " in said
    finding = gonio.check(tensors).findings[0]
    assert f"What to do: {finding.do}" in said


def test_where_the_model_is_not_known_the_report_says_what_was_not_looked_for(tmp_path: Path) -> None:
    state = nn.Linear(4, 4).state_dict()
    moments = torch.optim.SGD([torch.ones(2)]).state_dict()
    moments["state"] = {0: {"momentum_buffer": torch.ones(2)}}
    for content, said in (
        ({"network_weights": state, "epoch": 3}, "not known (there are some under network_weights): rows, filters"),
        ({"g": state, "d": state}, "not known (there are some under g, d): rows, filters"),
        ([state, state], "its tensors have no names: rows, filters and layers were not compared"),
        ({"model": state, "epoch": 3}, ""),
        ({"optimizer": moments, "epoch": 3}, ""),
        (moments, ""),
    ):
        torch.save(content, tmp_path / "saved.pt")
        notes = " ".join(gonio.check(tmp_path / "saved.pt").notes)
        assert said in notes
        assert ("were not compared" in notes) is bool(said)
