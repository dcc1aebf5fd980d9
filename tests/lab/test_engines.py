"""Engines: single calls in processes of their own, lost machines, and a Ray cluster of two nodes."""

from __future__ import annotations

import gc
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.lab import Study, make_plan, make_script_plan, run
from gonio.lab.running.engines import NodeLost, Ray, ray
from gonio.lab.running.engines.local import Worker, call_apart
from gonio.lab.running.scheduler import Lines
from lab.plans import OWN, TINY, Ended, Here
from lab.ray_clusters import head


def test_a_worker_has_the_folder_that_its_parent_has_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Worker(os.getcwd).result() == str(tmp_path)


def test_what_a_worker_prints_is_no_data(capfd: pytest.CaptureFixture[str]) -> None:
    Worker(print, "hello").result()
    captured = capfd.readouterr()
    assert captured.out == ""


def test_the_environment_of_the_parent_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    Worker(sorted, []).result()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    Worker(sorted, []).result()
    assert "OMP_NUM_THREADS" not in os.environ


def test_a_worker_collects_garbage_except_what_its_server_imported() -> None:
    assert Worker(gc.isenabled).result()
    assert Worker(gc.get_freeze_count).result() > 100_000


@pytest.mark.slow
def test_the_server_imports_what_it_is_given_beside_its_starter() -> None:
    code = """if __name__ == "__main__":
    import sys
    from gonio.lab.running.engines.local import server_running
    with server_running("colorsys"):
        assert "torch" not in sys.modules
    from gonio.lab.running.engines.local import Worker, call_apart
    for name in ("colorsys", "torch"):
        print(Worker(eval, f"{name!r} in __import__('sys').modules").result())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.parametrize(
    ("function", "argument", "cause"),
    [(os._exit, 3, "exit code 3"), (sys.exit, 0, "exit code 0"), (signal.raise_signal, 9, "signal SIGKILL")],
)
def test_a_death_has_a_cause(function: object, argument: int, cause: str) -> None:
    with pytest.raises(ChildProcessError, match=rf"the process of this run died \({cause}\)"):
        Worker(function, argument).result()  # type: ignore[arg-type]


def test_an_exception_of_a_call_is_told_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChildProcessError, match=r"^ValueError: .*abc.* \(local\.py:\d+\)$"):
        call_apart(int, "abc")
    with pytest.raises(ChildProcessError, match=r"^ValueError: Out of range float values are not JSON compliant"):
        call_apart(float, "nan")
    assert "Traceback" not in capfd.readouterr().err


PATIENCE = 500.0  # seconds; the machine may be busy with something else


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with one core; tests add nodes."""
    with head() as made:
        yield made


@pytest.fixture
def second_node(cluster: Any) -> Iterator[Any]:
    node = cluster.add_node(num_cpus=1, include_dashboard=False)
    cluster.wait_for_nodes()
    yield node
    if node in cluster.list_all_nodes():
        cluster.remove_node(node)


@pytest.mark.slow
def test_the_cluster_gives_the_same_numbers_as_local(second_node: Any, tmp_path: Path) -> None:
    plan = make_plan(["orthogonal-init"], task=f"{TINY}:task", seeds=2)
    here = run(plan, tmp_path / "here", jobs=1)
    engine = Ray()
    assert engine.slots == 2
    there = run(plan, tmp_path / "there", engine=engine)
    assert [record.status for record in there.runs()] == ["finished"] * 4
    assert there.runs() == here.runs()
    assert (there.missing(), there.without_costs()) == ([], [])


@pytest.mark.slow
def test_a_killed_worker_loses_its_run_alone(second_node: Any, tmp_path: Path) -> None:
    plan = make_script_plan([], script=f"{OWN}:mishaps", seeds=7)
    here = run(plan, tmp_path / "here", jobs=2)
    log = io.StringIO()
    there = run(plan, tmp_path / "there", engine=Ray(), watcher=Lines(log))
    assert [r.status for r in there.runs()] == [r.status for r in here.runs()]
    assert there.runs() == here.runs()
    assert there.runs()[4].error == "the process of this run died (signal SIGKILL)"
    assert "baseline, seed 4: failed: the process of this run died" in log.getvalue()
    assert [seed for _, seed in there.missing()] == [1, 3, 4, 5]


@pytest.mark.slow
def test_the_runs_of_a_killed_node_are_run_again(second_node: Any, cluster: Any, tmp_path: Path) -> None:
    where = tmp_path / "where"
    where.mkdir()
    script = tmp_path / "slow_on_node.py"
    script.write_text(SLOW.format(where=str(where)))
    plan = make_script_plan([], script=f"{script}:train", seeds=4)
    for marker in where.iterdir():  # of the probe
        marker.unlink()
    log = io.StringIO()
    study: list[Study] = []
    engine = Ray()
    driver = threading.Thread(target=lambda: study.append(run(plan, tmp_path / "s", engine=engine, watcher=Lines(log))))
    driver.start()
    second = str(second_node.all_processes["raylet"][0].process.pid)
    wait_until(lambda: second in nodes_of(where))
    (where / f"lost-{second}").touch()
    cluster.remove_node(second_node, allow_graceful=False)
    (where / "go").touch()
    driver.join(PATIENCE)
    assert not driver.is_alive()
    assert [record.status for record in study[0].runs()] == ["finished"] * 4
    assert [record.score for record in study[0].runs()] == [0.0, 1.0, 2.0, 3.0]
    assert re.search(r"(its node was lost \(|its worker ended with a node).*it is run again", log.getvalue())


@pytest.mark.parametrize(("lost", "error"), [(True, NodeLost), (False, ChildProcessError)])
def test_a_worker_that_ends_with_its_node_is_no_crash(
    monkeypatch: pytest.MonkeyPatch, lost: bool, error: type[Exception]
) -> None:
    """A node that shuts down ends its workers first, and is known to be gone a moment later."""
    library = pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setattr(ray, "_GONE", 0.5)
    seen = itertools.count()

    def nodes() -> list[dict[str, Any]]:
        return [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": not lost or next(seen) < 3}]

    def get(reference: Any) -> None:
        raise library.exceptions.WorkerCrashedError

    task = ray._Task(SimpleNamespace(nodes=nodes, get=get, exceptions=library.exceptions), None)  # type: ignore[arg-type]
    with pytest.raises(error, match="its worker ended with a node" if lost else "WorkerCrashedError"):
        task.result()


# Waits on whatever node it is until it may go on, and says where that is. The worker of a node that is killed lives a
# moment longer; it must not go on, or its run would not be lost.
SLOW = """
import os
import time
from pathlib import Path
from torch import nn

WHERE = Path("{where}")


def train(run):
    run.apply_(nn.Linear(2, 2))
    node = os.environ["RAY_RAYLET_PID"]
    (WHERE / f"node-{{node}}-{{run.seed}}").touch()
    while (WHERE / f"lost-{{node}}").exists() or not (WHERE / "go").exists():
        time.sleep(0.05)
    return float(run.seed)
"""


def nodes_of(where: Path) -> set[str]:
    return {path.name.split("-")[1] for path in where.glob("node-*")}


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("resources", [{"cpus": float("nan")}, {"gpus": float("nan")}, {"cpus": 0.0}, {"gpus": -1.0}])
def test_resources_that_are_no_positive_number(resources: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError, match="a run needs cpus above 0, gpus from 0 on"):
        Ray(**resources)


@pytest.mark.slow
def test_a_run_that_no_node_has_room_for(cluster: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"a run of 64 CPUs and 0 GPUs needs a node.*Ask for less, or add"):
        Ray(cpus=64)
    with pytest.raises(InvalidArgumentError, match="a run of 1 CPUs and 1 GPUs needs a node"):
        Ray(gpus=1)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "ray://127.0.0.1:1"])
def test_no_cluster(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(NotApplicableError, match=r"no Ray cluster answers there.*Start one with `ray start --head`"):
        Ray()


class Losing(Here):
    """Its machines disappear: the first `losses` jobs are lost, the rest run here and now."""

    def __init__(self, losses: int) -> None:
        self.losses = losses
        self.closed = False

    def start(self, function: Any, *arguments: Any) -> Any:
        self.losses -= 1
        return Ended(None if self.losses >= 0 else function(*arguments))

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("losses", "statuses"), [(2, ["finished"]), (3, ["failed"])])
def test_a_run_whose_machine_is_lost_is_run_again_twice(tmp_path: Path, losses: int, statuses: list[str]) -> None:
    engine, log = Losing(losses), io.StringIO()
    plan = make_script_plan([], script=f"{OWN}:noisy", seeds=1)
    study = run(plan, tmp_path, engine=engine, watcher=Lines(log))
    assert [record.status for record in study.runs()] == statuses
    assert log.getvalue().count("its node was lost; it is run again") == 2
    assert engine.closed
    if statuses == ["failed"]:
        assert study.runs()[0].error == "its node was lost, 3 times"


def test_an_engine_and_jobs_together_are_an_error(tmp_path: Path) -> None:
    plan = make_script_plan([], script=f"{OWN}:noisy", seeds=1)
    with pytest.raises(InvalidArgumentError, match="jobs= has no meaning with an engine"):
        run(plan, tmp_path, engine=Losing(0), jobs=2)
