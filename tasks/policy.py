"""The one task decorator of this project, and when a failed task is tried again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas import State, TaskRun
from prefect.tasks import Task

from signal_batch.errors import SignalBatchError
from signal_batch.execution import Execution
from signal_batch.training_spec import TrainExecution

P = ParamSpec("P")
R = TypeVar("R")

RETRIES = 3
RETRY_DELAYS_S = [2.0, 4.0, 8.0]
RETRY_JITTER = 0.5


def task(name: str) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A task that is retried, with backoff and jitter, only where that can help.

    Nothing is cached and no result is stored: the ledger in the output folder is the memory of
    a run, and what Prefect believes about a task decides nothing.
    """

    def decorate(function: Callable[P, R]) -> Task[P, R]:
        return Task(
            function,
            name=name,
            task_run_name=name,
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=RETRIES,
            retry_delay_seconds=RETRY_DELAYS_S,
            retry_jitter_factor=RETRY_JITTER,
            retry_condition_fn=can_pass,
        )

    return decorate


def can_pass(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Retry only what trying again can help: storage that did not answer, a worker that died."""
    exc = state.result(raise_on_failure=False)
    return isinstance(exc, SignalBatchError) and exc.transient


def retry_delays(execution: Execution | TrainExecution) -> list[float]:
    """Seconds before each retry of a worker, doubling; Prefect adds the jitter."""
    return [execution.retry_delay_s * 2**attempt for attempt in range(execution.retries)]
