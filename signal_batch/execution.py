"""How a job is run: where, by how many, how patiently; none of it changes the result."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from signal_batch.errors import SpecError
from signal_batch.frozen import Frozen

#: A week: whoever waits longer for one step has another problem.
MOST_SECONDS = 7 * 86_400

#: A runner is a name, and where it is if not on this machine: `dask:tcp://host:8786`.
RUNNER_FORM = (
    r"^(local|dask(:([a-z]+://)?[^\s/@?#]+:\d{1,5})?|ray(:(ray://)?[^\s/@?#]+:\d{1,5})?"
    r"|work-pool(:[^\s/]+/[^\s/]+)?)$"
)

#: Name of the block that holds the storage's environment variables; see `tasks.credentials`.
Credentials = Annotated[
    str | None,
    Field(
        title="Credentials",
        description="Prefect Secret block with environment variables for the storage",
        examples=["lab-bucket"],
    ),
]

#: Tags of the tasks that do the work; see "Run it for a team" in the README.
Limits = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(
        title="Limits",
        description="further tags of the working tasks, for Prefect's concurrency limits",
        examples=[["gpu"]],
    ),
]

#: Seconds before the second attempt of something that failed; twice as long before each further.
RetryDelay = Annotated[
    float,
    Field(
        ge=0, le=MOST_SECONDS, title="Retry delay (seconds)", description="first pause, doubling"
    ),
]

#: Whether records are decoded by signal-dataset itself, more slowly.
SafeDecode = Annotated[
    bool, Field(title="Safe decoder", description="use signal-dataset's decoder")
]


def refuse_block(credentials: str | None) -> None:
    """Refuse credentials from a block where no Prefect server hands it out."""
    if credentials is not None:
        raise SpecError(
            f"credentials {credentials!r} name a block on a Prefect server; run it with the "
            "installed signal-batch command, or leave them out and set the storage's environment "
            "variables"
        )


class Execution(Frozen):
    """How a job is run: changes its speed and its patience, never its result."""

    runner: str = Field(
        default="local",
        pattern=RUNNER_FORM,
        description="local, dask or ray (on this machine), dask:tcp://HOST:8786, "
        "ray:ray://HOST:10001, or work-pool[:FLOW/DEPLOYMENT]",
        examples=["local", "dask:tcp://scheduler:8786", "work-pool"],
    )
    workers: int = Field(default=2, ge=1, le=1024, description="worker processes at a time")
    retries: int = Field(default=3, ge=0, le=100, description="further attempts of a shard")
    retry_delay_s: RetryDelay = 2.0
    timeout_s: float = Field(
        default=900.0,
        gt=0,
        le=MOST_SECONDS,
        title="Timeout (seconds)",
        description="kill a worker silent for so long",
    )
    safe_decode: SafeDecode = False
    credentials: Credentials = None
    limits: Limits = ()

    @field_validator("runner", mode="before")
    @classmethod
    def _runner_in_words(cls, value: Any) -> Any:
        if isinstance(value, str) and re.fullmatch(RUNNER_FORM, value) is None:
            # Not repeated in the message: an address may carry a password.
            raise SpecError(
                "that is no runner; it is local, dask or dask:tcp://HOST:PORT, ray or "
                "ray:ray://HOST:PORT, work-pool or work-pool:FLOW/DEPLOYMENT"
            )
        return value

    @property
    def engine(self) -> str:
        """The runner's name without its place: `dask` for `dask:tcp://host:8786`."""
        return self.runner.partition(":")[0]

    @property
    def runner_address(self) -> str | None:
        """Where the runner is; None for one on this machine, or for the usual deployment."""
        return self.runner.partition(":")[2] or None
