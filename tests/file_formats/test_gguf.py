"""GGUF: equal figures, values of blocks beside the package's own reader, planted damages, changed bytes."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gonio
from catalog import seeded
from file_formats.cases import STATE, assert_equal_figures, codes, fuzz
from gonio.errors import MissingExtraError, UnreadableFileError
from gonio.measuring.reading import gguf_files
from gonio.measuring.reading.source import contents_of

PLAIN = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30, torch.float64: 28}
ALIGNMENT = 32


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word)) + word.encode()


KEYS = [
    text("general.architecture") + struct.pack("<I", 8) + text("llama"),
    text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
    text("tokenizer.ggml.scores") + struct.pack("<IIQff", 9, 6, 2, 0.0, 1.0),
    text("llama.rope.freq_base") + struct.pack("<If", 6, 1e4),
]
Part = tuple[str, tuple[int, ...], int, bytes]


def gguf_bytes(parts: list[Part], *, version: int = 3, shift: int = 0, keys: list[bytes] = KEYS) -> bytes:
    """A file by the format's description; `shift` is added to the offset of the second tensor."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(parts), len(keys)) + b"".join(keys)
    data = b""
    for number, (name, shape, kind, raw) in enumerate(parts):
        at = len(data) + (shift if number == 1 else 0)
        head += (
            text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)) + struct.pack("<IQ", kind, at)
        )
        data += raw + bytes(-len(raw) % ALIGNMENT)
    return head + bytes(-len(head) % ALIGNMENT) + data


def parts_of(state: dict[str, Tensor]) -> list[Part]:
    return [
        (name, tuple(t.shape), PLAIN[t.dtype], t.contiguous().view(torch.uint8).numpy().tobytes())
        for name, t in state.items()
    ]


@pytest.mark.parametrize("dtype", PLAIN)
def test_equal_weights_have_equal_figures(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {name: value.to(dtype) for name, value in STATE.items()}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(parts_of(state)))
    assert_equal_figures(tmp_path / "m.gguf", state, tmp_path / "safe")
    assert gonio.check(tmp_path / "m.gguf").notes == ("general.architecture is llama",)


def test_the_package_writes_what_is_read(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, value in STATE.items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_equal_figures(tmp_path / "m.gguf", STATE, tmp_path / "safe")


@pytest.mark.parametrize("kind", sorted(gguf_files._BLOCKS))
def test_blocks_have_the_values_of_the_package(tmp_path: Path, kind: int) -> None:
    gguf = pytest.importorskip("gguf")
    name, entries, width = gguf_files._BLOCKS[kind]
    of_package = gguf.GGMLQuantizationType(kind)
    assert (of_package.name, gguf.GGML_QUANT_SIZES[of_package]) == (name, (entries, width))
    draw = np.random.default_rng(kind)
    raw = draw.integers(256, size=(6, 2 * width), dtype=np.uint8)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes([("a.weight", (6, 2 * entries), kind, raw.tobytes())]))
    (entry,) = contents_of(tmp_path / "m.gguf").entries
    if name in ("Q8_1", "Q8_K", "Q1_0"):  # of products while a model runs, or newer than the package's reader
        assert f"its type {name} is not read by the package gguf" in (entry.reason, *entry.notes)
        assert gonio.check(tmp_path / "m.gguf")["a"].reason
        return
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, of_package)
    found = entry.read()
    assert found is not None
    assert np.array_equal(found.numpy(), expected, equal_nan=True)
    assert f"dequantised from {name}" in entry.notes
    bad = ~np.isfinite(expected)
    assert gonio.check(tmp_path / "m.gguf")["a"].nonfinite == bad.sum()


@pytest.mark.parametrize(("name", "form"), [
    # One block of the scale 0.5: (bytes, values) by ggml-common.h and ggml-quants.c.
    ("Q8_0", lambda: (struct.pack("<e32b", 0.5, *range(-16, 16)), [0.5 * n for n in range(-16, 16)])),
    ("Q4_0", lambda: (struct.pack("<e16B", 0.5, *(n | (15 - n) << 4 for n in range(16))),
                      [0.5 * (n - 8) for n in [*range(16), *reversed(range(16))]])),
    ("Q4_1", lambda: (struct.pack("<ee16B", 0.5, 2.0, *(n | (15 - n) << 4 for n in range(16))),
                      [0.5 * n + 2 for n in [*range(16), *reversed(range(16))]])),
    ("Q5_0", lambda: (struct.pack("<eI16B", 0.5, 0xFFFF0000, *(n | n << 4 for n in range(16))),
                      [0.5 * (n - 16) for n in [*range(16), *range(16, 32)]])),
    ("Q5_1", lambda: (struct.pack("<eeI16B", 0.5, 2.0, 0xFFFF0000, *(n | n << 4 for n in range(16))),
                      [0.5 * n + 2 for n in [*range(16), *range(16, 32)]])),
    ("Q6_K", lambda: (bytes(128) + bytes(64) + bytes([2] * 16) + struct.pack("<e", 0.5), [0.5 * 2 * -32] * 256)),
    ("Q4_K", lambda: (struct.pack("<ee", 0.5, 0.25) + bytes([3] * 4 + [1] * 4 + [0x13] * 4) + bytes([0x52] * 128),
                      [n for _ in range(4) for n in [0.5 * 3 * 2 - 0.25] * 32 + [0.5 * 3 * 5 - 0.25] * 32])),
])  # fmt: skip
def test_blocks_have_the_values_of_their_description(
    tmp_path: Path, name: str, form: Callable[[], tuple[bytes, list[float]]]
) -> None:
    pytest.importorskip("gguf")
    kind, entries = next((k, b[1]) for k, b in gguf_files._BLOCKS.items() if b[0] == name)
    raw, values = form()
    (tmp_path / "m.gguf").write_bytes(gguf_bytes([("a.weight", (2, entries), kind, raw + raw)]))
    found = contents_of(tmp_path / "m.gguf").entries[0].read()
    assert found is not None
    assert found.tolist() == [values, values]


def test_many_blocks_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.setattr(gguf_files, "_CHUNK", 96)
    value = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).numpy()
    raw = gguf.quantize(value, gguf.GGMLQuantizationType.Q8_0)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes([("a.weight", (7, 64), 8, raw.tobytes())]))
    found = contents_of(tmp_path / "m.gguf").entries[0].read()
    assert found is not None
    assert np.array_equal(found.numpy(), gguf.dequantize(raw, gguf.GGMLQuantizationType.Q8_0))
    assert np.abs(found.numpy() - value).max() < np.abs(value).max() / 127


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes([("a.weight", (1, 32), 8, bytes(34))]))
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "gguf.quants", raising=False)
    with pytest.raises(MissingExtraError, match=r"quantised tensors of GGUF needs the package 'gguf'.*gonio\[gguf\]"):
        gonio.check(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(parts_of(STATE)))
    assert gonio.check(tmp_path / "m.gguf").intact  # plain numbers need no package


PARTS = parts_of(STATE)


def one(**changes: Any) -> bytes:
    """The file with another first tensor."""
    name, shape, kind, raw = PARTS[0]
    part = (changes.get("name", name), changes.get("shape", shape), changes.get("kind", kind), raw)
    return gguf_bytes([part, *PARTS[1:]])


DAMAGES: dict[str, tuple[bytes, str]] = {
    "cut off in the data": (gguf_bytes(PARTS)[:-300], "G704"),
    "cut off in the header": (gguf_bytes(PARTS)[:100], "refused"),
    "an empty file": (b"", "refused"),
    "no magic": (b"GGUX" + gguf_bytes(PARTS)[4:], "refused"),
    "a version that is not known": (gguf_bytes(PARTS, version=9), "refused"),
    "big-endian numbers": (b"GGUF" + struct.pack(">I", 3) + gguf_bytes(PARTS)[8:], "refused"),
    "a name that occurs twice": (one(name=PARTS[1][0]), "G703"),
    "tensors that overlap": (gguf_bytes(PARTS, shift=-64), "G704"),
    "a gap": (gguf_bytes(PARTS[:2], shift=64) + bytes(64), "G705"),
    "an offset that is not aligned": (gguf_bytes(PARTS, shift=4), "G704"),
    "a type that is not known": (one(kind=77), "G704"),
    "a row that is no multiple of a block": (one(kind=8), "G704"),
    "fewer entries than bytes": (one(shape=(11, 20)), "G705"),
    "more entries than bytes": (one(shape=(13, 20)), "G704"),
    "a tensor of terabytes": (one(shape=(1 << 40, 20)), "G704"),
    "five dimensions": (one(shape=(1, 1, 1, 12, 20)), "refused"),
    "bytes after the end": (gguf_bytes(PARTS) + bytes(100), "G705"),
    "an alignment of 0": (gguf_bytes(PARTS, keys=[text("general.alignment") + struct.pack("<II", 4, 0)]), "refused"),
    "a key of no type": (gguf_bytes(PARTS, keys=[text("a") + struct.pack("<II", 44, 0)]), "refused"),
    "an array without end": (gguf_bytes(PARTS, keys=[text("a") + struct.pack("<IIQ", 9, 8, 1 << 60)]), "refused"),
    "a value that is not finite": (gguf_bytes(parts_of({**STATE, "n": torch.tensor([[1.0, torch.nan]])})), "G001"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damages_are_named(tmp_path: Path, kind: str) -> None:
    if "multiple of a block" in kind:
        pytest.importorskip("gguf")
    raw, code = DAMAGES[kind]
    (tmp_path / "m.gguf").write_bytes(raw)
    assert code in codes(tmp_path / "m.gguf")
    if code != "refused":
        gonio.measure(tmp_path / "m.gguf")
    else:
        with pytest.raises(UnreadableFileError, match=r"not an intact file|version 9 of GGUF is not read|big-endian"):
            gonio.measure(tmp_path / "m.gguf")


def test_parts_of_a_file_are_read_together(tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(gguf_bytes(PARTS[number : number + 1]))
    (tmp_path / "m-00003-of-00004.gguf").write_bytes(gguf_bytes(PARTS[2:]))
    for number in (0, 1):
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").rename(tmp_path / f"m-0000{number + 1}-of-00004.gguf")
    assert len(gonio.measure(tmp_path)) == 3
    assert codes(tmp_path) == {"G702"}  # the fourth


def test_a_part_that_is_cut_off_is_damaged_in_its_folder_too(tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(gguf_bytes(PARTS[number : number + 1]))
    second = tmp_path / "m-00002-of-00002.gguf"
    second.write_bytes(second.read_bytes()[:-4])
    found, checked = gonio.measure(tmp_path), gonio.check(tmp_path)
    assert [(f.code, f.path) for f in found.findings] == [("G704", second.name)]
    assert {(f.code, f.path) for f in checked.findings} == {("G704", second.name)}
    assert [t.status for t in found.tensors] == ["measured", "skipped"]
    assert "cut off" in found.tensors[1].reason


@pytest.mark.parametrize("times", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_changed_bytes_leave_no_other_error(tmp_path: Path, times: int) -> None:
    block = [] if not has_package() else [("q.weight", (4, 256), 12, bytes(range(144)) * 4)]
    (tmp_path / "m.gguf").write_bytes(gguf_bytes([*PARTS, *block]))
    assert fuzz(tmp_path / "m.gguf", tmp_path / "m.gguf", times) > 0


def has_package() -> bool:
    try:
        import gguf  # noqa: F401
    except ImportError:
        return False
    return True


def a_language_model(blocks: int, rows: int, width: int = 8) -> dict[str, Tensor]:
    parts = ("attn_q", "attn_k", "attn_output", "ffn_down")
    shapes = {f"blk.{block}.{part}.weight": (width, width) for block in range(blocks) for part in parts}
    shapes |= {"token_embd.weight": (rows, width), "output_norm.weight": (width,)}
    return {name: seeded(*shape, seed=number) for number, (name, shape) in enumerate(shapes.items())}


def keys_of(kind: str = "", tokens: int = 6, **numbers: int) -> list[bytes]:
    """Metadata of an architecture `own`, the numbers under its name."""
    keys = [text("general.architecture") + struct.pack("<I", 8) + text("own")]
    keys += [text("general.type") + struct.pack("<I", 8) + text(kind)] if kind else []
    keys += [text(f"own.{name}") + struct.pack("<II", 4, number) for name, number in numbers.items()]
    return [*keys, text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, tokens) + text("a") * tokens]


FEWER = ("blk", "3 blocks, and the header states 4")
NARROW = ("", "no tensor is 16 wide, as the header states")
SHORT = ("token_embd", "6 rows, and the header lists 7 tokens")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (keys_of(block_count=3, embedding_length=8), []),
        (keys_of(block_count=4), [FEWER]),
        (keys_of("model", block_count=4), [FEWER]),
        (keys_of(block_count=4, nextn_predict_layers=1), []),  # which may be left out
        (keys_of("mmproj", block_count=4, embedding_length=16), []),
        (keys_of("adapter", tokens=7, block_count=4), []),
        (keys_of(block_count=3, embedding_length=16), [NARROW]),
        (keys_of(tokens=7), [SHORT]),
        (keys_of(tokens=5), []),  # rows that fill up the table
        (KEYS, []),
    ],
)
def test_the_header_is_held_against_the_tensors(
    tmp_path: Path, keys: list[bytes], expected: list[tuple[str, str]]
) -> None:
    """llama.cpp refuses such a file; without its last block it was "Intact"."""
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(parts_of(a_language_model(3, 6)), keys=keys))
    for found in (gonio.check(tmp_path / "m.gguf"), gonio.measure(tmp_path / "m.gguf")):
        assert [(each.path, each.found) for each in found.findings if each.code == "G717"] == expected


@pytest.mark.parametrize("lost", [False, True])
def test_the_header_of_the_first_part_is_that_of_all(tmp_path: Path, lost: bool) -> None:
    state = parts_of(a_language_model(4, 6))
    halves = [state[:6], [*state[6:12], *state[16:]] if lost else state[6:]]
    for number, (part, keys) in enumerate(zip(halves, [keys_of(block_count=4), []], strict=True)):
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(gguf_bytes(part, keys=keys))
    for found in (gonio.check(tmp_path), gonio.measure(tmp_path)):
        told = [(each.path, each.found) for each in found.findings if each.code == "G717"]
        assert told == ([FEWER] if lost else [])
    first = gonio.check(tmp_path / "m-00001-of-00002.gguf")
    assert "G717" not in [each.code for each in first.findings]
