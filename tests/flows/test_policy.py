"""When a task is tried again, and how many run at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefect.states import Failed
from prefect.task_runners import ThreadPoolTaskRunner

from signal_batch import errors
from signal_batch.execution import Execution
from tasks import export as export_tasks
from tasks import fanout, policy, validation
from tasks import inputs as input_tasks
from tasks import training as training_tasks

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.SignalBatchError)
]
TASKS = [
    input_tasks.validate_dataset,
    input_tasks.pin_inputs,
    input_tasks.select_records,
    export_tasks.plan_parts,
    export_tasks.export_shard,
    export_tasks.commit_output,
    export_tasks.leave_report,
    training_tasks.plan_run,
    training_tasks.measure_statistics,
    training_tasks.take_steps,
    training_tasks.evaluate_model,
    training_tasks.publish_model,
    training_tasks.report_run,
    validation.check_dataset,
]


def passes(exc: BaseException) -> bool:
    return policy.can_pass(None, None, Failed(data=exc))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CLASSES)
def test_only_storage_and_dead_workers_are_tried_again(kind: type[Exception]) -> None:
    assert passes(kind("x")) == (kind in (errors.StorageError, errors.WorkerDiedError))


@pytest.mark.parametrize("exc", [OSError("x"), ValueError("x"), MemoryError(), KeyError("x")])
def test_what_is_not_known_is_not_tried_again(exc: Exception) -> None:
    assert not passes(exc)


def test_delays_double() -> None:
    assert policy.retry_delays(Execution(retries=4, retry_delay_s=0.5)) == [0.5, 1.0, 2.0, 4.0]
    assert policy.retry_delays(Execution(retries=0)) == []


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_task_has_the_policy(task: Any) -> None:
    assert task.retries == 3
    assert task.retry_delay_seconds == [2.0, 4.0, 8.0]
    assert task.retry_jitter_factor == 0.5
    assert task.retry_condition_fn is policy.can_pass
    assert not task.persist_result


def test_a_shard_keeps_the_policy_under_its_own_name() -> None:
    named = export_tasks.export_shard.with_options(task_run_name="x", retries=1)
    assert named.retry_condition_fn is policy.can_pass
    assert named.retry_jitter_factor == 0.5


class Running:
    """Counts how many submitted functions have not ended."""

    def __init__(self) -> None:
        self.now = self.most = self.submitted = 0
        self._lock = threading.Lock()

    def submit(self, number: int, seconds: float) -> Callable[[], Any]:
        def sleep() -> int:
            time.sleep(seconds)
            with self._lock:
                self.now -= 1
            return number

        def submit() -> Any:
            with self._lock:
                self.submitted += 1
                self.now += 1
                self.most = max(self.most, self.now)
            return FakeFuture.running(sleep)

        return submit


class FakeFuture:
    """As much of a Prefect future as `as_completed` needs; the real ones are in the flow tests."""

    def __init__(self) -> None:
        self._final_state: Any = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._lock = threading.Lock()
        self.value: Any = None

    @classmethod
    def running(cls, function: Callable[[], Any]) -> FakeFuture:
        future = cls()

        def run() -> None:
            future.value = function()
            with future._lock:
                future._final_state = True
                callbacks = list(future._callbacks)
            for callback in callbacks:
                callback(future)

        threading.Thread(target=run, daemon=True).start()
        return future

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        with self._lock:
            if not self._final_state:
                self._callbacks.append(callback)
                return
        callback(self)


def named_value(item: tuple[str, Any]) -> int:
    label, future = item
    assert label == str(future.value)
    return int(future.value)


@given(
    seconds=st.lists(st.sampled_from([0.0, 0.001, 0.003]), max_size=12),
    limit=st.integers(1, 5),
    taken=st.integers(0, 12),
)
@settings(max_examples=40, deadline=None)
def test_never_more_than_the_limit_and_every_one_once(
    seconds: list[float], limit: int, taken: int
) -> None:
    running = Running()
    submits = {str(n): running.submit(n, pause) for n, pause in enumerate(seconds)}
    futures: Iterator[Any] = fanout.run_bounded(submits, limit)
    first = [named_value(item) for _, item in zip(range(taken), futures, strict=False)]
    # A consumer that has stopped: nothing more is submitted.
    assert running.submitted <= min(len(seconds), limit + max(taken, 1))
    rest = [named_value(item) for item in futures]
    assert sorted(first + rest) == list(range(len(seconds)))
    assert running.most <= limit


def test_the_runner_itself_sets_no_limit() -> None:
    assert ThreadPoolTaskRunner()._max_workers > 1024
