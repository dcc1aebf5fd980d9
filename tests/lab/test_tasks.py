"""The tasks: their data, metrics, and refusals."""

from __future__ import annotations

import gzip
import math
import struct
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from foreign import torchvision
from gonio.errors import InvalidArgumentError, MissingExtraError, UnknownNameError, UnreadableFileError
from gonio.lab import make_plan
from gonio.lab.tasks import bytes_, digits, points, resolve
from gonio.lab.tasks.built_in import (
    SOLIDS,
    Solid,
    _texts,
    bits_per_byte,
    next_byte_loss,
    random_turns,
    shifted,
    turned,
)
from gonio.lab.tasks.images import flipped_and_cropped, to_tensor
from gonio.lab.tasks.metric import ACCURACY, Metric, accuracy
from gonio.lab.tasks.task import Split
from gonio.models import byte_transformer


def test_digits_are_split_into_equal_shares_of_every_class_without_overlap() -> None:
    task = digits()
    assert [len(split) for split in task.splits.values()] == [200, 400, 1197]
    assert task.train.targets.bincount().tolist() == [20] * 10
    assert task.validation.targets.bincount().tolist() == [40] * 10
    images = [{image.numpy().tobytes() for image in split.inputs} for split in task.splits.values()]
    # all 1,797 images of the set differ from each other
    assert len(images[0] | images[1] | images[2]) == 1797


def test_digits_are_the_same_for_ever() -> None:
    # changes if the data, the split or torch's generator changes: old studies then refuse to be extended
    assert digits().digest() == "540e507ea43df2b9b6be4e0a810a26b14edc8e468edca611e5eac26f2ea250c2"


def test_shifted_moves_each_image_by_at_most_one_pixel() -> None:
    images = torch.rand(50, 2, 5, 6, generator=torch.Generator().manual_seed(0))
    moved = shifted(images, torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
    seen = set()
    for before, after in zip(padded, moved, strict=True):
        at = [(i, j) for i in range(3) for j in range(3) if torch.equal(before[:, i : i + 5, j : j + 6], after)]
        assert len(at) == 1
        seen.add(at[0])
    assert len(seen) == 9


def test_accuracy_in_percent() -> None:
    outputs = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
    assert accuracy(outputs, torch.tensor([1, 1, 1])) == 200 / 3
    assert (ACCURACY.direction, ACCURACY.worst) == ("max", 0.0)


def test_metric_and_split_refuse_nonsense() -> None:
    with pytest.raises(InvalidArgumentError, match="direction must be 'max' or 'min'; found 'up'"):
        Metric("f1", accuracy, "up")
    with pytest.raises(InvalidArgumentError, match="found 2 inputs and 3 targets"):
        Split(torch.zeros(2), torch.zeros(3))


def test_user_task_must_be_a_task(tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_text("def make(): return 3\n")
    with pytest.raises(InvalidArgumentError, match="must build a task; found an int"):
        resolve(f"{path}:make")


def test_digits_without_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    with pytest.raises(MissingExtraError, match=r"needs the package 'scikit-learn'.*gonio\[lab\]"):
        digits()


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


Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def fill(folder: Path, *, classes: tuple[str, ...] = ("cat", "dog"), count: int = 10, size=(8, 8), mode="L") -> None:
    """`count` images per class; the grey level of each is its class and number."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            shape = (size[1], size[0]) + ((3,) if mode == "RGB" else ())
            Image.fromarray(np.full(shape, 100 * label + i, dtype=np.uint8), mode).save(folder / name / f"{i}.png")


def test_class_folders_are_split_in_equal_shares_of_every_class(tmp_path: Path) -> None:
    fill(tmp_path)
    task = resolve(f"imagefolder:{tmp_path}")
    assert [len(split) for split in task.splits.values()] == [12, 4, 4]
    assert [split.targets.bincount().tolist() for split in task.splits.values()] == [[6, 6], [2, 2], [2, 2]]
    levels = [{round(255 * float(image.mean())) for image in split.inputs} for split in task.splits.values()]
    assert set.union(*levels) == {*range(10), *range(100, 110)}
    assert sum(map(len, levels)) == 20
    assert task.sizes == {"num_classes": 2, "in_channels": 1}
    assert task.digest() == resolve(f"imagefolder:{tmp_path}").digest()
    assert task.name == f"imagefolder:{tmp_path.name}"


@pytest.mark.parametrize(("parts", "sizes"), [(("train", "test"), [16, 4, 8]), (("train", "val", "test"), [20, 6, 8])])
def test_splits_that_are_there_are_kept(tmp_path: Path, parts: tuple[str, ...], sizes: list[int]) -> None:
    for part in parts:
        fill(tmp_path / part, count={"train": 10, "val": 3, "test": 4}[part])
    assert [len(split) for split in resolve(f"imagefolder:{tmp_path}").splits.values()] == sizes


def test_other_sizes_are_scaled_and_cut_and_grey_becomes_colour(tmp_path: Path) -> None:
    fill(tmp_path, classes=("wide",), size=(40, 20), count=5)
    fill(tmp_path, classes=("high",), size=(30, 100), count=5, mode="RGB")
    task = resolve(f"imagefolder:{tmp_path}")
    assert task.train.inputs.shape == (6, 3, 64, 64)
    assert float(task.train.inputs.std((1, 2, 3)).max()) < 1e-6  # each image has one level, and still has


def test_images_are_standardised_in_front_of_the_model_and_stay_in_their_own_unit(tmp_path: Path) -> None:
    fill(tmp_path, mode="RGB")
    task = resolve(f"imagefolder:{tmp_path}")
    assert (float(task.train.inputs.min()), float(task.train.inputs.max())) >= (0.0, 0.3)
    seen = task.outputs(torch.nn.Identity(), task.train.inputs)
    assert torch.allclose(seen.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(seen.std((0, 2, 3)), torch.ones(3), atol=1e-5)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "1", "P"])
def test_pillows_modes(mode: str) -> None:
    image = Image.new("RGB", (3, 2), (255, 255, 255)).convert(mode)
    found = to_tensor(image)
    assert found.shape == (1 if mode == "L" else 3, 2, 3)
    assert bool((found == 1).all())


def test_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="needs a folder of images; found no folder"):
        resolve(f"imagefolder:{tmp_path / 'nothing'}")
    with pytest.raises(InvalidArgumentError, match="at least two classes; found 0 such folders"):
        resolve(f"imagefolder:{tmp_path}")
    fill(tmp_path / "train")
    fill(tmp_path / "test", classes=("cat", "cow"))
    with pytest.raises(InvalidArgumentError, match="same class folders; found cat, dog in train and cat, cow in test"):
        resolve(f"imagefolder:{tmp_path}")


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "cat" / "3.png").write_bytes(b"no image")
    with pytest.raises(UnreadableFileError, match=r"3.png': cannot be read; UnidentifiedImageError"):
        resolve(f"imagefolder:{tmp_path}")


def write_fashion_mnist(root: Path) -> None:
    """Twenty training and ten test images in torchvision's own place and format."""
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 20), ("t10k", 10)):
        labels = bytes(i % 10 for i in range(count))
        pixels = bytes(i for i in range(count) for _ in range(28 * 28))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, count, 28, 28) + pixels)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels)


def test_a_data_set_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision()
    write_fashion_mnist(tmp_path / "data")
    task = resolve(f"torchvision:FashionMNIST:{tmp_path / 'data'}")
    assert task.test.targets.tolist() == list(range(10))
    assert torch.equal(task.test.inputs[3], torch.full((1, 28, 28), 3 / 255))
    assert len(task.train) + len(task.validation) == 20
    assert task.sizes == {"num_classes": 10, "in_channels": 1}
    monkeypatch.chdir(tmp_path)
    assert resolve("torchvision:FashionMNIST").digest() == task.digest()


def test_a_damaged_packed_file_is_named(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path)
    raw = tmp_path / "FashionMNIST" / "raw"
    packed = bytearray(gzip.compress((raw / "train-images-idx3-ubyte").read_bytes()))
    packed[10:30] = b"\xff" * 20
    (raw / "train-images-idx3-ubyte.gz").write_bytes(packed)
    with pytest.raises(UnreadableFileError, match="train-images-idx3-ubyte': cannot be read; it is not an IDX file"):
        resolve(f"fashion-mnist:{raw}")


def test_a_data_set_that_is_not_there_is_not_downloaded(tmp_path: Path) -> None:
    torchvision()
    message = r"needs its data in '.*'; found Dataset not found.*Get them once with torchvision.datasets.FashionMNIST"
    with pytest.raises(InvalidArgumentError, match=message):
        resolve(f"torchvision:FashionMNIST:{tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_no_data_set_of_images() -> None:
    torchvision()
    with pytest.raises(UnknownNameError, match=r"no torchvision data set named 'FashionMINST'. Did you mean FashionM"):
        resolve("torchvision:FashionMINST")
    with pytest.raises(InvalidArgumentError, match="takes neither train= nor split="):
        resolve("torchvision:FakeData")


def test_without_torchvision_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.datasets", raising=False)
    with pytest.raises(MissingExtraError, match=r"needs the package 'torchvision'.*gonio\[models\]"):
        resolve("torchvision:MNIST")


# --- data of the field --------------------------------------------------------------------------------------


def write_cifar10(folder: Path, *, counts: tuple[int, ...] = (24, 12), test: int = 10) -> None:
    """Files in the binary layout: image i of a file has label i modulo 10 and one number in all pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data_batch_{number}.bin" for number in range(1, len(counts) + 1)]
    for name, count in zip([*names, "test_batch.bin"], [*counts, test], strict=True):
        rows = b"".join(bytes([i % 10]) + bytes([i]) * 3072 for i in range(count))
        (folder / name).write_bytes(rows)


def test_cifar10_in_its_binary_layout(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    task = resolve(f"cifar10:{tmp_path}")
    assert [len(split) for split in task.splits.values()] == [33, 3, 10]
    assert torch.equal(task.test.inputs[7], torch.full((3, 32, 32), 7 / 255))
    both = torch.cat([task.train.targets, task.validation.targets])
    assert both.bincount().tolist() == [5, 5, 4, 4, 3, 3, 3, 3, 3, 3]  # of 24 and of 12 images
    assert all(
        int(x[0, 0, 0] * 255 + 0.5) % 10 == y for x, y in zip(task.train.inputs, task.train.targets, strict=True)
    )
    assert resolve(f"cifar10:{tmp_path}").digest() == task.digest()


def test_a_channel_of_cifar10_is_a_plane(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    planes = bytes([0]) + bytes([10]) * 1024 + bytes([20]) * 1024 + bytes(range(32)) * 32
    (tmp_path / "test_batch.bin").write_bytes(planes)
    (image,) = resolve(f"cifar10:{tmp_path}").test.inputs
    assert (image[:2, 0, 0] * 255).round().tolist() == [10, 20]
    assert (image[2, 5] * 255).round().tolist() == [*range(32)]  # a row runs along the last axis


@pytest.mark.parametrize("damage", [b"", b"x" * 3072, bytes([10]) + bytes(3072)])
def test_a_damaged_file_of_cifar10_is_named(tmp_path: Path, damage: bytes) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(damage)
    with pytest.raises(UnreadableFileError, match=r"data_batch_2.bin.* bytes are not whole images of 3073 bytes"):
        resolve(f"cifar10:{tmp_path}")
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(InvalidArgumentError, match=r"needs data_batch_1.bin and test_batch.bin; found 2 training"):
        resolve(f"cifar10:{tmp_path}")


def test_images_are_mirrored_and_moved() -> None:
    """Each output is a window of the padded image or of its mirror; half are mirrored, offsets are uniform."""
    image = torch.arange(1.0, 65.0).view(1, 1, 8, 8)
    moved = flipped_and_cropped(image.expand(COUNT, 1, 8, 8), draw())
    padded = [F.pad(each, (4, 4, 4, 4))[0, 0] for each in (image, image.flip(3))]
    windows = torch.stack([p[r : r + 8, c : c + 8] for p in padded for r in range(9) for c in range(9)])
    found = (moved[:, 0].flatten(1)[:, None] == windows.flatten(1)).all(2)
    assert bool((found.sum(1) >= 1).all())
    shares = found.float().mean(0)
    assert float(shares.max()) < 1.5 / 162
    assert float(shares[:81].sum()) == pytest.approx(0.5, abs=0.02)


def test_all_of_fashion_mnist(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path)
    task = resolve(f"fashion-mnist-full:{tmp_path / 'FashionMNIST' / 'raw'}")
    assert [len(split) for split in task.splits.values()] == [19, 1, 10]
    assert torch.equal(task.test.inputs[3], torch.full((1, 28, 28), 3 / 255))


def test_a_text_is_split_in_order(tmp_path: Path) -> None:
    raw = bytes(i % 251 for i in range(129 * 60))
    (tmp_path / "a.txt").write_bytes(raw)
    task = resolve(f"text:{tmp_path / 'a.txt'}")
    assert [len(split) for split in task.splits.values()] == [54, 3, 3]
    assert bytes(task.train.inputs.flatten().tolist()) == raw[: 54 * 128]
    start = int(0.95 * len(raw))
    assert bytes(task.test.targets[0].tolist()) == raw[start + 1 : start + 129]
    with pytest.raises(InvalidArgumentError, match="needs a file of text; found no such file"):
        resolve(f"text:{tmp_path / 'b.txt'}")
    (tmp_path / "a.txt").write_bytes(raw[:4000])
    with pytest.raises(InvalidArgumentError, match="two windows of 128 bytes in 5 % of the file; found 4000 bytes"):
        resolve(f"text:{tmp_path / 'a.txt'}")


COUNT = 20_000


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_cubes_points_are_on_its_six_faces_in_equal_shares() -> None:
    half = math.sqrt(0.5)
    cube = Solid(((0.0, -half), (1.0, -half), (1.0, half), (0.0, half)), sides=4).sample(COUNT, draw())
    turn = torch.tensor([[half, -half, 0.0], [half, half, 0.0], [0.0, 0.0, 1.0]])  # corners to faces
    where = cube @ turn
    assert torch.allclose(where.abs().amax(1), torch.full((COUNT,), half), atol=1e-5)
    face = 2 * where.abs().argmax(1) + (where.gather(1, where.abs().argmax(1, keepdim=True))[:, 0] > 0)
    # each count is binomial with mean 3333 and standard deviation 53
    assert all(abs(int(n) - COUNT / 6) < 4 * 53 for n in face.bincount(minlength=6))


def test_a_cylinders_points_are_as_many_on_its_side_as_its_area() -> None:
    cylinder = SOLIDS["cylinder"].sample(COUNT, draw())
    radius, height = cylinder[:, :2].norm(dim=1), cylinder[:, 2]
    side = height.abs() < 0.8 - 1e-6
    assert torch.allclose(radius[side], torch.ones(int(side.sum())), atol=1e-5)
    share = 2 * math.pi * 1.6 / (2 * math.pi * 1.6 + 2 * math.pi)
    assert float(side.float().mean()) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / COUNT))
    # on a disc the square of the radius is uniform
    assert float((radius[~side] ** 2).mean()) == pytest.approx(0.5, abs=0.02)


def test_turns_are_rotations_about_the_upright_axis() -> None:
    turns = random_turns(50, draw())
    assert torch.allclose(turns @ turns.mT, torch.eye(3).expand(50, 3, 3), atol=1e-6)
    assert torch.allclose(torch.linalg.det(turns), torch.ones(50), atol=1e-6)
    assert bool((turns @ torch.tensor([0.0, 0.0, 1.0]) == torch.tensor([0.0, 0.0, 1.0])).all())


def test_an_epochs_clouds_are_turned_and_noisy_and_depend_on_their_generator_alone() -> None:
    clouds = points().train.inputs[:20]
    first, again, other = (turned(clouds, draw(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert float((first[:, 2] - clouds[:, 2]).std()) == pytest.approx(0.02, rel=0.1)  # noise alone moves the height
    assert float((first[:, :2] - clouds[:, :2]).abs().max()) > 0.5


def test_splits_hold_every_solid_equally_often_and_no_cloud_twice() -> None:
    task = points()
    assert [len(split) for split in task.splits.values()] == [400, 400, 1200]
    for split in task.splits.values():
        assert split.targets.bincount().tolist() == [len(split) // 10] * 10
        assert torch.allclose(split.inputs.norm(dim=1).amax(1), torch.ones(len(split)), atol=1e-6)
    assert len({c.numpy().tobytes() for split in task.splits.values() for c in split.inputs}) == 2000
    assert task.digest() == points().digest()


def test_the_notes_of_a_tuned_image_study_do_not_deny_the_tuning(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    fill(tmp_path)
    notes = make_plan([], task=f"imagefolder:{tmp_path}", seeds=1, tune=2).notes
    assert not any("nothing was tuned" in note.lower() for note in notes)
