"""Prefect's server for the time of one command, where no server is configured.

Prefect starts one by itself, but in the terminal's process group: Ctrl-C then ends the server
before the run could be closed, and the client tries for minutes to reach it; and a command that
is killed leaves it behind. Here it runs in a session of its own, and ends with the command.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from signal_batch.errors import SignalBatchError
from signal_batch.program import end_with_parent

#: As Prefect sets them for a server without a page and without background services.
_ENVIRONMENT = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
}
_STOP_S = 5.0


#: Where the server of this process answers, while it runs.
_own_url: str | None = None


def configured() -> bool:
    """Whether a server is named in the environment or in Prefect's profile."""
    return get_current_settings().api.url not in (None, _own_url)


def available() -> bool:
    """Whether there is a server, configured or started by this process."""
    return get_current_settings().api.url is not None


@contextmanager
def server() -> Iterator[None]:
    """Run the server while the block runs; nothing to do where there is one."""
    global _own_url
    if available():
        yield
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = get_current_settings()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.embedded", str(os.getpid()), str(port)],
            env={
                **os.environ,
                **_ENVIRONMENT,
                **settings.to_environment_variables(exclude_unset=True),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            if not _answers(process, port, settings.server.ephemeral.startup_timeout_seconds):
                log.seek(0)
                said = log.read().decode(errors="replace").strip()[-2000:]
                raise SignalBatchError(
                    "Prefect's embedded server did not start; name one with PREFECT_API_URL, or "
                    f"run `python -m signal_batch`, which needs none. It last said: {said}"
                )
            _own_url = f"http://127.0.0.1:{port}/api"
            with temporary_settings({PREFECT_API_URL: _own_url}):
                try:
                    yield
                finally:
                    _send_what_waits()
                    _own_url = None
        finally:
            _stop(process)


def _answers(process: subprocess.Popen[bytes], port: int, timeout_s: float) -> bool:
    import httpx

    deadline = time.monotonic() + timeout_s
    with httpx.Client(trust_env=False) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if client.get(f"http://127.0.0.1:{port}/api/health").status_code == 200:
                    return True
            except httpx.TransportError:
                time.sleep(0.1)
    return False


def _send_what_waits() -> None:
    """Logs and events are sent in the background: have them sent while there is a server."""
    for service in (APILogWorker, EventsWorker):
        with suppress(Exception):
            service.drain_all(timeout=_STOP_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """Be the server: `python -m flows.embedded PARENT PORT`."""
    import uvicorn

    end_with_parent(int(sys.argv[1]))
    uvicorn.run(
        "prefect.server.api.server:create_app",
        factory=True,
        host="127.0.0.1",
        port=int(sys.argv[2]),
        log_level="error",
        lifespan="on",
    )


if __name__ == "__main__":
    main()
