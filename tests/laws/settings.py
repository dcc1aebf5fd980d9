"""Every method in the settings of real training: one subject per row of the page `docs/matrix.md`.

A subject is a small model that holds the method, or a layer under a penalty. Each check trains it in a setting and
compares with the plain loop, or moves it through a format and compares its outputs.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import gonio
from catalog import LAYERS, PARAMETRIZATIONS, REGULARIZERS, seeded
from gonio import parametrizations as P
from gonio import regularizers as R
from laws.support import MODULES, Checkpointed, assert_near, clone
from tolerances import close, exact

BATCH = 8  # divisible by 2 and 4 processes
Forward = Callable[[Tensor], Tensor]


def row_of(name: str) -> str:
    """The row of a case of the catalogue: one for all dimensions and options of a method."""
    if name.startswith("SpectralNorm of conv"):
        return "SpectralNorm of conv"
    return re.sub(r"\dd$", "", name.removeprefix("scaled ").replace(",", " ").split()[0])


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A method with a model to be trained."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a batch
    regularizer: R.Regularizer | None = None

    @property
    def folds(self) -> bool:
        return P.is_parametrized(self.make()[0])

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def x(self) -> Tensor:
        return seeded(*self.shape, seed=3)

    def penalty(self, model: nn.Module, **options: Any) -> Callable[[], Tensor] | None:
        return None if self.regularizer is None else gonio.Penalty(model, [(None, self.regularizer)], **options)


def _subjects() -> Iterable[Subject]:
    seen: set[str] = set()
    for case in MODULES:
        if (row := row_of(case.name)) not in seen:
            seen.add(row)
            yield Subject(name=row, make=lambda case=case: nn.Sequential(case.make()), shape=(BATCH, *case.shape[1:]))
    for case in REGULARIZERS:
        if (row := row_of(case.name)) not in seen:
            seen.add(row)
            if len(case.shape) == 2:
                make, shape = lambda: nn.Sequential(nn.Linear(6, 4)), (BATCH, 6)
            else:
                make, shape = lambda: nn.Sequential(nn.Conv2d(2, 4, 3)), (BATCH, 2, 5, 5)
            yield Subject(name=row, make=make, shape=shape, regularizer=case.make())


SUBJECTS = list(_subjects())
assert len(SUBJECTS) == len({row_of(c.name) for c in (*LAYERS, *PARAMETRIZATIONS, *REGULARIZERS)})


def loss_of(output: Tensor) -> Tensor:
    factors = torch.linspace(0.5, 1.5, output[0].numel(), device=output.device).view(output.shape[1:])
    return (output * factors).square().mean()


def step(model: Forward, x: Tensor, penalty: Callable[[], Tensor] | None, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss = loss_of(model(x))
    (loss if penalty is None else loss + penalty()).backward()
    optimizer.step()


def train(subject: Subject, *, wrap: Callable[[nn.Module], Forward] = lambda m: m, steps: int = 2) -> list[Tensor]:
    """The state after some steps of a plain loop; `wrap` goes around the model after the penalty has been built."""
    model, x = subject.model(), subject.x()
    penalty, wrapped = subject.penalty(model), wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        step(wrapped, x, penalty, optimizer)
    return [t.detach().clone() for t in model.state_dict().values()]


def assert_trained(found: Iterable[Tensor], subject: Subject) -> None:
    for index, (a, e) in enumerate(zip(found, train(subject), strict=True)):
        assert_near(a, e, torch.float32, what=f"{subject.name}, tensor {index} of the state")


# --- a training in this process ---------------------------------------------------------------------


def check_checkpoint(subject: Subject) -> None:
    assert_trained(train(subject, wrap=Checkpointed), subject)


def check_lightning(subject: Subject) -> None:
    import lightning.pytorch as library

    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = subject.model()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return loss_of(self.model(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    module = Module()
    penalty = subject.penalty(module.model)
    if penalty is not None:
        gonio.integrations.lightning.add_penalty_(module, penalty)
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = library.Trainer(max_steps=2, accelerator="cpu", devices=1, default_root_dir=folder, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader([subject.x()] * 2, batch_size=None))
    assert_trained(module.model.state_dict().values(), subject)


def check_transformers(subject: Subject) -> None:
    import transformers as library

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = subject.model()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            output = self.model(x)
            return {"loss": loss_of(output), "logits": output}

    class Ordered(library.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = library.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=BATCH, num_train_epochs=2, max_grad_norm=0.0, use_cpu=True,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        rows = [{"x": row} for row in subject.x()]
        trainer = Ordered(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, constant))
        penalty = subject.penalty(model.model)
        if penalty is not None:
            gonio.integrations.transformers.add_penalty_(trainer, penalty)
        trainer.train()
    assert_trained(model.model.state_dict().values(), subject)


def check_accelerate(subject: Subject) -> None:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), subject.model()
    penalty = subject.penalty(model)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(wrapped(subject.x()))
        accelerator.backward(loss if penalty is None else loss + penalty())
        optimizer.step()
    assert_trained(model.state_dict().values(), subject)
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_model(wrapped, folder)
        fresh = subject.model()
        load_model(fresh, str(next(Path(folder).glob("*.safetensors"))))
    assert_same(fresh, model, subject)


# --- formats ----------------------------------------------------------------------------------------


def assert_same(found: Forward, expected: nn.Module, subject: Subject) -> None:
    x = subject.x()
    with torch.no_grad():
        found = found.eval() if isinstance(found, nn.Module) else found
        assert_near(found(x), expected.eval()(x), torch.float32, kind=exact, what=subject.name)


def moved(subject: Subject) -> nn.Module:
    """The model after some training under its penalty, so that nothing has its first value."""
    model = subject.model()
    for value, tensor in zip(train(subject), model.state_dict().values(), strict=True):
        tensor.copy_(value)
    return model


def plain(subject: Subject) -> tuple[nn.Module, nn.Module]:
    """A model and what is exported of it: itself, or its folded copy if it is parametrized."""
    model = moved(subject).eval()
    folded = clone(model)
    if subject.folds:
        gonio.fold_(folded)
    return model, folded


def check_export(subject: Subject) -> None:
    model = moved(subject).eval()
    subject.penalty(model)
    program = torch.export.export(model, (subject.x(),))
    assert_near(program.module()(subject.x()), model(subject.x()), torch.float32, kind=exact, what=subject.name)


def check_onnx(subject: Subject) -> None:
    import onnxruntime

    model, folded = plain(subject)
    program = torch.onnx.export(folded, (subject.x(),), dynamo=True, verbose=False)
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=providers)
    name = session.get_inputs()[0].name
    assert_same(lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]), model, subject)


def check_int8(subject: Subject) -> None:
    """Linear layers in 8 bits; decoupled layers and norms stay in floats."""
    model, folded = plain(subject)
    quantised = torch.ao.quantization.quantize_dynamic(folded, {nn.Linear}, dtype=torch.qint8)
    x = subject.x()
    deviation = (quantised(x) - model(x)).norm() / model(x).norm()
    assert deviation < 0.02, f"{subject.name}: int8 deviates by {deviation:.3f}"  # 8 bits: steps of 1/127 of the range
    assert (type(quantised[0]) is not type(folded[0])) == (type(folded[0]) is nn.Linear)


def check_safetensors(subject: Subject) -> None:
    model = moved(subject)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, f"{folder}/model.safetensors")
        fresh = subject.model()
        load_model(fresh, f"{folder}/model.safetensors")
    assert_same(fresh, model, subject)


def check_meta(subject: Subject) -> None:
    """Built without values, checked for shapes, allocated, loaded; the penalty is built before there are values."""
    model = moved(subject).eval()
    deferred = clone(model).to("meta")
    penalty = subject.penalty(deferred)
    assert deferred(subject.x().to("meta")).shape == model(subject.x()).shape
    deferred.to_empty(device="cpu")
    deferred.load_state_dict(model.state_dict())
    if penalty is not None:
        reference = subject.penalty(model)
        model.train()(subject.x()), deferred.train()(subject.x())
        torch.testing.assert_close(penalty(), reference(), **close(torch.float32))
    assert_same(deferred, moved(subject), subject)


LOCAL: dict[str, Callable[[Subject], None]] = {
    "checkpoint": check_checkpoint,
    "Lightning": check_lightning,
    "HF": check_transformers,
    "Accelerate": check_accelerate,
    "export": check_export,
    "ONNX": check_onnx,
    "int8": check_int8,
    "safetensors": check_safetensors,
    "meta": check_meta,
}
