"""The task `bytes`: where its text comes from, and a metric of which less is better."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from gonio.compare.tasks import bytes_
from gonio.compare.tasks.bytes import _texts, bits_per_byte, next_byte_loss
from gonio.errors import InvalidArgumentError
from gonio.models import byte_transformer


def test_windows_are_text_of_the_standard_library_with_the_byte_that_follows() -> None:
    task = bytes_()
    everything = b"".join(
        path.read_bytes().replace(b"\r\n", b"\n") for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    )
    for split in task.splits.values():
        for index in (0, len(split) - 1):
            window, follows = (bytes(part[index].tolist()) for part in (split.inputs, split.targets))
            assert window[1:] == follows[:-1]
            assert window + follows[-1:] in everything


def test_no_file_is_in_two_splits_and_the_same_text_comes_again() -> None:
    texts = _texts(Path(sysconfig.get_paths()["stdlib"]))
    kept = {name: set(found) for name, found in texts.items()}
    assert not kept["train"] & kept["test"]
    assert not kept["train"] & kept["validation"]
    assert not kept["validation"] & kept["test"]
    assert bytes_().digest() == bytes_().digest()


def test_a_files_split_depends_on_its_name_alone(tmp_path: Path) -> None:
    names = [f"module{i}.py" for i in range(60)]
    for name in names:
        (tmp_path / name).write_text(f"# {name}\n" * 600)
    before = _texts(tmp_path)
    assert all(before.values())  # with 60 names each split has some
    for name in names[::2]:
        (tmp_path / name).unlink()
    after = _texts(tmp_path)
    assert all(set(after[split]) <= set(before[split]) for split in before)
    assert sum(map(len, after.values())) == 30


def test_short_files_and_line_ends(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_bytes(b"x" * 4095)
    (tmp_path / "long.py").write_bytes(b"x = 1\r\n" * 1000)
    assert [text for found in _texts(tmp_path).values() for text in found] == [b"x = 1\n" * 1000]


def test_a_python_without_its_sources_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InvalidArgumentError, match=r"needs 1024 windows of 128 bytes .* found 0. Use a Python whose"):
        bytes_()


def test_bits_per_byte_is_the_cross_entropy_to_base_2() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(70, 5, 256, generator=draw)  # more than one part of the sum
    targets = torch.randint(0, 256, (70, 5), generator=draw)
    chances = torch.softmax(logits.double(), -1).gather(-1, targets[..., None])
    reference = -chances.log2().mean().item()
    assert bits_per_byte(logits, targets) == pytest.approx(reference, rel=1e-12)
    assert next_byte_loss(logits, targets).item() == pytest.approx(reference * math.log(2), rel=1e-6)


def test_the_transformer_looks_back_only() -> None:
    torch.manual_seed(0)
    model = byte_transformer()
    text = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(1))
    changed = text.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 256
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=0, atol=0)
    assert bool((before[:, 12:] != after[:, 12:]).any(-1).all())


def test_the_transformers_attention_is_the_formula() -> None:
    torch.manual_seed(0)
    block = byte_transformer().blocks[0].double()
    x = torch.randn(1, 6, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    query, key, value = F.linear(x, block.qkv.weight).chunk(3, -1)
    heads = []
    for at in range(0, 64, 16):
        scores = query[0, :, at : at + 16] @ key[0, :, at : at + 16].T / 4
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf)
        heads.append(torch.softmax(scores, -1) @ value[0, :, at : at + 16])
    torch.testing.assert_close(block.attend(x)[0], torch.cat(heads, -1) @ block.out.weight.T)
