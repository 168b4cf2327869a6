"""Who gets the next piece of work, what is remembered of files, and what is ended at closing. No runtime is started."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from text_parser import parse

from edge_opt.ir import to_bytes
from edge_opt.runtime import runner
from edge_opt.runtime.errors import RuntimeUnavailable
from edge_opt.runtime.runner import WorkerPool, check_model

pytestmark = pytest.mark.usefixtures("own_workers")


class Worker:
    """There once it was started or had work."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.ended: list[str] = []

    def start(self) -> None:
        self.pid = 1

    def retire(self) -> None:
        self.ended.append("retired")

    def close(self) -> None:
        self.ended.append("closed")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> WorkerPool:
    monkeypatch.setattr(runner, "Worker", Worker)
    return WorkerPool(3)


def place(of: WorkerPool, worker: Any) -> int:
    worker.start()
    return of.workers.index(worker)


def test_work_goes_to_a_worker_that_is_there_before_another_is_started(made: WorkerPool) -> None:
    made.start()
    assert [worker.pid for worker in made.workers] == [1, None, None]
    for _ in range(3):
        assert made.submit(lambda worker: place(made, worker)).result() == 0
    made.close()


def test_while_one_is_busy_another_is_started_only_for_what_is_to_be_alone(made: WorkerPool) -> None:
    made.start()
    go_on, begun = threading.Event(), threading.Event()

    def wait(worker: Any) -> int:
        begun.set()
        assert go_on.wait(30)
        return place(made, worker)

    busy = made.submit(wait)
    assert begun.wait(30)
    assert made.submit(lambda worker: place(made, worker), alone=False).result() == 0
    assert made.submit(lambda worker: place(made, worker)).result() == 1
    assert made.submit(lambda worker: place(made, worker), alone=False).result() == 1
    go_on.set()
    assert busy.result() == 0
    made.close()


def test_a_failure_frees_its_worker_and_is_told(made: WorkerPool) -> None:
    def fail(_: Any) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        made.submit(fail).result()
    assert made.submit(lambda worker: place(made, worker)).result() == 0
    made.close()
    assert all(worker.ended[0] == "retired" and worker.ended[-1] == "closed" for worker in made.workers)  # type: ignore[attr-defined]


def test_closing_ends_what_runs_and_drops_what_waits(
    made: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    retired, begun = threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(Worker, "retire", lambda _: retired.set())

    def run(_: Any) -> bool:
        begun.release()
        return retired.wait(30) and not time.sleep(0.2)

    running = [made.submit(run) for _ in range(made.count)]
    for _ in running:
        assert begun.acquire(timeout=30)
    waiting = made.submit(run)
    made.close()
    assert all(future.done() and future.result() for future in running)
    assert waiting.cancelled()


def test_a_child_that_was_started_while_its_worker_was_retired_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, ended = runner.Worker(), []

    class Child:
        def __init__(self) -> None:
            worker.retire()

        def stop(self) -> None:
            ended.append(self)

    monkeypatch.setattr(runner, "ChildProcess", Child)
    worker.start()
    assert len(ended) == 1
    with pytest.raises(RuntimeUnavailable, match="retired"):
        worker.start()
    assert len(ended) == 1


def test_there_is_one_worker_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Worker", Worker)
    assert [WorkerPool(count).count for count in (-1, 0, 1, 2)] == [1, 1, 1, 2]


def test_a_file_that_passed_is_read_once_and_the_oldest_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = to_bytes(parse("subgraph main (%x: float32[4]) { %y: float32[4] = ABS(%x) return %y }"))
    files = [tmp_path / f"{number}.tflite" for number in range(33)]
    for file in files:
        file.write_bytes(content)
    read: list[Any] = []
    load = runner.load
    monkeypatch.setattr(runner, "load", lambda model: read.append(model) or load(model))
    for file in (*files, files[32], files[1], files[0], files[0]):
        check_model(file)
    assert read == [str(file) for file in (*files, files[0])]
    files[0].write_bytes(content + bytes(16))
    for model in (files[0], content, content):
        check_model(model)
    assert len(read) == 37
