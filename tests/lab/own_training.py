"""Training functions as a user would write them; the tests name them as `…/own_training.py:train`."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from gonio.lab import Run


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Which side of a plane a point lies on."""
    x = torch.randn(64, 4)
    return x, (x.sum(1) > 0).long()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def steps(model: nn.Module, run: Run, *, begin: int = 0, end: int = 5) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data()
    for step in range(begin, end):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss + run.penalty()).backward()
        optimizer.step()
        run.log(step, train_loss=loss)
    return 100 * float((model(x).argmax(1) == y).float().mean())


def train(run: Run) -> float:
    model = net()
    run.apply_(model)
    return steps(model, run)


def noisy(run: Run) -> float:
    """No training: a score that depends on the seed and the recipe, in a millisecond; says when it starts."""
    run.apply_(net())
    journal = os.environ.get("GONIO_TEST_JOURNAL")
    if journal:
        with open(journal, "a") as file:
            file.write(f"{run.recipe} {run.seed}\n")
    time.sleep(float(os.environ.get("GONIO_TEST_SLEEP", "0")))
    draw = torch.Generator().manual_seed(run.seed)
    return float(torch.randn((), generator=draw)) + len(run.recipe)


def uneven(run: Run) -> float:
    """As `noisy`, but every sixth seed takes two seconds: longer than a worker lives after its node."""
    if run.seed % 6 == 5:
        time.sleep(2.0)
    return noisy(run)


def hangs(run: Run) -> float:
    """Seed 1 never ends, in one of two ways."""
    run.apply_(net())
    if run.seed == 1:
        os.kill(os.getpid(), signal.SIGSTOP) if run.recipe == "baseline" else time.sleep(600)
    return float(run.seed)


def leaves_processes(run: Run) -> float:
    """Starts a process, and one whose parent ends, in sessions of their own or (seed 2) in its own; says which."""
    run.apply_(net())
    apart = run.seed != 2
    first = subprocess.Popen(["sleep", "600"], start_new_session=apart)
    words = ["sh", "-c", f"{'setsid ' if apart else ''}sleep 600 > /dev/null & echo $!"]
    second = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, start_new_session=apart).stdout
    Path(os.environ["GONIO_TEST_JOURNAL"]).write_text(f"{first.pid} {second}")
    if run.seed:
        time.sleep(600)
    return 1.0


def kills_its_server(run: Run) -> float:
    run.apply_(net())
    time.sleep(0.3 * run.seed)
    if run.seed == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.5)
    return float(run.seed)


def without_model(run: Run) -> float:
    return 1.0


def without_score(run: Run) -> None:
    run.apply_(net())


def raises(run: Run) -> float:
    raise KeyError("no such <b>column</b>")


def mishaps(run: Run) -> float:
    """What can go wrong goes wrong, by seed; the rest is fine."""
    run.apply_(net())
    if run.seed == 1:
        raise RuntimeError("a defect of the script")
    if run.seed == 2:
        return float("nan")
    if run.seed == 3:
        torch.empty(2**50)  # a petabyte: the allocator refuses
    if run.seed == 4:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is gone
    if run.seed == 5:
        raise SystemExit("the script gave up")
    return float(run.seed)


def greedy(run: Run) -> float:
    """Some seeds want more memory than there is, and learn it in one of three ways."""
    run.apply_(net())
    if run.seed in (1, 2):
        limit_memory(64 * 2**20)
    if run.seed == 1:
        bytearray(2**30)  # Python's own MemoryError
    if run.seed == 2:
        torch.empty(2**30, dtype=torch.uint8)
    if run.seed == 3:
        os.kill(os.getpid(), signal.SIGKILL)  # all that a process sees of the kernel's out-of-memory killer
    return float(run.seed)


def limit_memory(more: int) -> None:
    """From now on this process gets so many bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def resumes(run: Run) -> float:
    """Dies half way at its first try, and goes on from its checkpoint at the second."""
    model = net()
    run.apply_(model)
    if not run.resume_path.exists():
        steps(model, run, end=3)
        torch.save(model.state_dict(), run.resume_path)
        os.kill(os.getpid(), signal.SIGKILL)
    model.load_state_dict(torch.load(run.resume_path, weights_only=True))
    steps(model, run, begin=3)
    return 7.0


def distributed(run: Run) -> None:
    """Starts two processes, which train with DistributedDataParallel; the first of them reports."""
    torch.multiprocessing.spawn(_rank, args=(run,), nprocs=2)


def _rank(rank: int, run: Run) -> None:
    where = f"file://{run.folder / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(run.seed)
    model = net()
    run.apply_(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data()
    for step in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(x[rank::2]), y[rank::2]) + run.penalty()
        loss.backward()
        optimizer.step()
        run.log(step, train_loss=loss)
    norms = torch.stack([p.detach().norm() for p in model.parameters()])
    both = [torch.zeros_like(norms) for _ in range(2)]
    torch.distributed.all_gather(both, norms)
    run.report(float(norms.sum()) if torch.equal(*both) else float("nan"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def score_of_seed(run: Run) -> float:
    """Noise that depends on nothing but the seed."""
    run.apply_(net())
    return float(torch.randn((), generator=torch.Generator().manual_seed(run.seed)))


def measured(run: Run) -> float:
    """Everything that a run can be told: costs, several metrics, and the model for attacks."""
    model = net()
    run.apply_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data()
    for step in range(12):
        with run.step():
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + run.penalty()).backward()
            optimizer.step()
        run.log(step, val_score=step, f1=float(run.seed) if step < 11 else float(run.seed + len(run.recipe)))
    run.hand_over(model, x, y, low=-1.0)
    return 100 * float((model(x).argmax(1) == y).float().mean())
