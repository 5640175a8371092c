"""The devices that JAX computes on: one thread on a CPU, one device a rank, and ranks that meet."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from signal_batch.batches import Array
from signal_batch.training import BatchSpec

#: Both are read when JAX's CPU client is made; older versions know the second only.
THREAD_VARIABLES = ("PJRT_NPROC", "NPROC")


def join(spec: BatchSpec) -> None:
    """Meet the other ranks, unless this process already has."""
    if spec.world == 1 or jax.distributed.is_initialized():
        return
    assert spec.coordinator is not None
    # It would take SIGTERM for a notice that the machine is about to go, and not end the process.
    with suppress(AttributeError):  # not in older versions
        jax.config.update("jax_enable_preemption_service", False)  # type: ignore[no-untyped-call]
    local = spec.coordinator.startswith(("127.", "localhost:"))
    jax.distributed.initialize(
        coordinator_address=spec.coordinator,
        num_processes=spec.world,
        process_id=spec.rank,
        cluster_detection_method="deactivate",
        # By default it would listen on every interface of the machine.
        coordinator_bind_address=spec.coordinator if local and spec.rank == 0 else None,
    )


def mesh() -> Mesh:
    """One device of each process: of several that a process sees, its share by rank.

    So ranks of one host that see the same GPUs compute on different ones.
    """
    devices: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        devices.setdefault(device.process_index, []).append(device)
    chosen = [devices[rank][rank % len(devices[rank])] for rank in sorted(devices)]
    return Mesh(np.array(chosen), ("data",))


def shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """The same on every device, and divided along the record axis."""
    specs = PartitionSpec(), PartitionSpec("data")  # type: ignore[no-untyped-call]
    return NamedSharding(mesh, specs[0]), NamedSharding(mesh, specs[1])


def shared(sharding: NamedSharding, array: Array) -> jax.Array:
    """A global array from what this rank holds of it."""
    found: jax.Array = jax.make_array_from_process_local_data(  # type: ignore[no-untyped-call]
        sharding, array
    )
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """While JAX's CPU client is made: give it one thread, unless a person has set a number.

    XLA adds up in an order that depends on the number of threads, by default that of cores: with
    jaxlib 0.10.2 a few steps end with other bits for 1, 2 and 8, whatever
    `--xla_cpu_multi_thread_eigen` says, so a run could not be repeated on another machine. It
    costs little: on two cores the quickest step of 64 complex records of 1024 samples took 92 ms
    with one thread and 110 ms with two. Ranks are the way to use more cores. There is no effect
    if JAX has computed before in this process.
    """
    ours = [] if any(name in os.environ for name in THREAD_VARIABLES) else THREAD_VARIABLES
    os.environ.update(dict.fromkeys(ours, "1"))
    try:
        jax.devices()
        yield
    finally:
        for name in ours:
            del os.environ[name]


@contextmanager
def silent() -> Iterator[None]:
    """While ranks connect: Gloo writes a line about it to standard output, past Python."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def local(leaf: jax.Array) -> jax.Array:
    """This rank's copy of an array that all ranks have."""
    found: jax.Array = leaf.addressable_data(0)
    return found
