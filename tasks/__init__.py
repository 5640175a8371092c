"""Prefect tasks: each is one call into `signal_batch`, plus retries, a name and tracking.

What belongs here: the retry policy, task names, artifacts, fan-out. What does not: anything
that decides what is written; that is in the core, and is tested there.
"""
