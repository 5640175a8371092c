"""Prefect flows: the order of the steps of a job, one flow a file, and the installed command.

What belongs here: which task follows which. What does not: anything that a task could do.

Prefect reads its settings from the environment when it is first imported, and sends usage
telemetry unless told not to: so it is told here, before it is imported.

So that runs which died are found soon, a run shows every 30 s that it is alive; see
deployments/automations.yaml.
"""

import os

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30")


def quiet_prefect() -> None:
    """Our own messages instead of Prefect's log, which it sets up when it is first imported."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
