"""Deployments brought to a Prefect server: registered on a work pool, or served by this process."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import anyio
import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.deployments.runner import DeploymentApplyError, RunnerDeployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.runner import Runner
from prefect.settings import get_current_settings
from prefect.workers.process import ProcessWorker

from signal_batch.errors import InputError, SignalBatchError

_START_ONE = (
    "start one with `prefect server start` and set PREFECT_API_URL to where it answers, such as "
    "http://127.0.0.1:4200/api"
)
#: Names of this machine, and how long a server on it may take to start.
_HERE, _STARTS_S = ("127.0.0.1", "localhost"), 30.0
#: How long a run may take to stop by itself when serving ends.
_PATIENCE_S = 3.5


@contextmanager
def server() -> Iterator[SyncPrefectClient]:
    """A client of the server that is configured.

    Raises `SignalBatchError` where there is none, or where it refuses: what to do is part of it.
    """
    url = get_current_settings().api.url
    if url is None:
        raise SignalBatchError(f"no Prefect server is named; {_START_ONE}")
    try:
        with get_client(sync_client=True) as client:
            if problem := _arrival(client, url):
                raise SignalBatchError(
                    f"no Prefect server answers at {url} ({_said(problem)}); {_START_ONE}"
                )
            yield client
    except PrefectHTTPStatusError as exc:
        raise SignalBatchError(_refusal(url, exc.response)) from exc
    except httpx.TransportError as exc:
        raise SignalBatchError(f"the Prefect server at {url} went away: {_said(exc)}") from exc


def _arrival(client: SyncPrefectClient, url: str) -> Exception | None:
    """What is wrong with the server; one on this machine may have been started just now."""
    deadline = time.monotonic() + (_STARTS_S if urlsplit(url).hostname in _HERE else 0)
    while problem := client.api_healthcheck():
        if time.monotonic() > deadline or isinstance(problem, PrefectHTTPStatusError):
            return problem
        time.sleep(0.5)
    return None


def page() -> str:
    """Where the server shows its deployments."""
    settings = get_current_settings()
    return f"{settings.ui_url or str(settings.api.url).removesuffix('/api')}/deployments"


def ensure_pool(client: SyncPrefectClient, name: str) -> bool:
    """Create a process work pool of that name if there is no pool; whether it did."""
    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(
            WorkPoolCreate(name=name, type="process", base_job_template=template)
        )
        return True
    return False


def register(
    client: SyncPrefectClient, deployments: Sequence[RunnerDeployment], pool: str
) -> list[str]:
    """Create the deployments on a work pool, or update those that are there.

    Returns the names of those that are paused, by a person or as the last `serve` left them.
    Raises `InputError` for the first that the server refuses.
    """
    for deployment in deployments:
        deployment.work_pool_name = pool
        _apply(client, deployment, deployment.apply)
    names = [deployment.full_name for deployment in deployments]
    return [name for name in names if client.read_deployment_by_name(name).paused]


def serve(
    client: SyncPrefectClient, deployments: Sequence[RunnerDeployment], limit: int | None
) -> None:
    """Run what is scheduled or asked for of the deployments, each run in a process of its own.

    At most `limit` runs at a time; None leaves it to Prefect's setting. Returns after SIGINT or
    SIGTERM, with the runs stopped and the deployments paused: otherwise runs that nobody takes
    would pile up. They are resumed by the next `serve`.
    """
    runner = _PromptRunner(limit=limit, pause_on_shutdown=True)
    for deployment in deployments:
        # Said, not left out: a deployment that was on a work pool leaves it. What a pool's
        # workers would be given as environment, this process has itself.
        deployment.work_pool_name = deployment.work_queue_name = None
        deployment.job_variables = {}
        if "paused" not in deployment.model_fields_set:
            deployment.paused = False  # as the last serve left it paused
        _apply(client, deployment, lambda: runner.add_deployment(deployment))  # noqa: B023
    # As for SIGTERM; a KeyboardInterrupt would leave it to chance what the runs are told.
    signal.signal(signal.SIGINT, runner.handle_sigterm)
    asyncio.run(runner.start())


class _PromptRunner(Runner):
    """Stops all runs at once, and within seconds.

    Prefect's stops one after the other, each three seconds or more, and waits half a minute for
    one that does not end. Nothing is lost with a run that is killed: the next one goes on.
    """

    async def cancel_all(self) -> None:
        async with anyio.create_task_group() as group:
            for run_id in self._process_manager.flow_run_ids():
                group.start_soon(self._stop_run, run_id)

    async def _stop_run(self, run_id: UUID) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._kill_late, run_id)
            await self._cancel_run(run_id, "serve was stopped; the same run goes on from there")
            group.cancel_scope.cancel()

    async def _kill_late(self, run_id: UUID) -> None:
        await anyio.sleep(_PATIENCE_S)
        if self._process_manager.get(run_id) is not None:
            await self._process_manager.kill(run_id, force=True)


def _apply(client: SyncPrefectClient, deployment: RunnerDeployment, apply: Any) -> None:
    try:
        apply()
    except DeploymentApplyError as exc:
        raise InputError(f"the server refuses deployment {deployment.name}: {exc}") from exc
    except PrefectHTTPStatusError as exc:
        if exc.response.status_code not in (409, 422):
            raise
        detail = exc.response.json().get("detail")
        raise InputError(f"the server refuses deployment {deployment.name}: {detail}") from exc
    _forget_schedules(client, deployment)


def _forget_schedules(client: SyncPrefectClient, deployment: RunnerDeployment) -> None:
    """Delete schedules that an earlier file had; Prefect keeps those that have slugs."""
    if not deployment.schedules:
        return
    slugs = {schedule.slug for schedule in deployment.schedules}
    standing = client.read_deployment_by_name(deployment.full_name)
    for schedule in standing.schedules:
        if schedule.slug not in slugs:
            client.delete_deployment_schedule(standing.id, schedule.id)


def _refusal(url: str, response: httpx.Response) -> str:
    if response.status_code in (401, 403):
        return f"the Prefect server at {url} asks for a login: set PREFECT_API_AUTH_STRING"
    return f"the Prefect server at {url} answered {response.status_code}: {response.text[:300]}"


def _said(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__
