"""Images on this machine as tasks: folders, and torchvision's data sets without a download."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from foreign import torchvision
from gonio.compare.tasks import resolve
from gonio.compare.tasks.images import to_tensor
from gonio.errors import InvalidArgumentError, MissingExtraError, UnknownNameError, UnreadableFileError

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
    with pytest.raises(UnreadableFileError, match=r"3.png' was to be read; UnidentifiedImageError"):
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
