"""The built-in trainer `jax`: a small 1-D residual network in Flax NNX, trained with Optax.

It classifies one input of shape (channels, time) or (time,), float or complex; a complex channel
becomes two, its real and its imaginary part, and a third, its log power (see `_features`)::

    stem      convolution with a stride
    blocks    each: normalise, ReLU, convolve, normalise, ReLU, convolve; added to what went in
    head      normalise, ReLU, mean over time, dense

The blocks are those of K. He et al., "Identity mappings in deep residual networks" (ECCV 2016),
with RMS norms over the channels of one position (B. Zhang and R. Sennrich, "Root mean square layer
normalization", NeurIPS 2019) in place of batch norms: what comes out for a record does not depend
on the other records of its batch, on how a batch is divided among ranks, or on padding.

Everything that was learned is in the arrays of the state, and a step is a pure function of them
and of the batch. On a CPU the same steps give the same bits on any number of cores, as JAX is told
to compute on one: see `_one_thread`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped,unused-ignore]
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from signal_batch.batches import Array
from signal_batch.errors import SpecError, WorkerDiedError
from signal_batch.training import BatchSpec, Classifier, Metrics, ModelBatch, State, check_classes

Tree: TypeAlias = Any  # nested dicts and tuples of arrays, as JAX passes them around

#: Both are read when JAX's CPU client is made; older versions know the second only.
THREAD_VARIABLES = ("PJRT_NPROC", "NPROC")
#: Log powers are cut off here: a record of unit power, and 40 dB below.
SMALLEST_POWER = 1e-4
NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Options:
    """What `trainer_args` may hold."""

    width: int = 16
    blocks: int = 4
    kernel: int = 7
    stride: int = 4
    learning_rate: float = 1e-2
    warmup_fraction: float = 0.1
    weight_decay: float = 0.05
    label_smoothing: float = 0.0
    clip_norm: float = 1.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("width", "blocks", "kernel", "stride"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"trainer jax: {name} must be a positive integer, not {value!r}")
        if self.kernel % 2 == 0:
            raise SpecError(f"trainer jax: kernel must be odd, not {self.kernel}")
        for name in ("learning_rate", "clip_norm"):
            if not _is_number(value := getattr(self, name)) or value <= 0:
                raise SpecError(f"trainer jax: {name} must be a positive number, not {value!r}")
        if not _is_number(self.weight_decay) or self.weight_decay < 0:
            raise SpecError(
                f"trainer jax: weight_decay must be 0 or a positive number, not "
                f"{self.weight_decay!r}"
            )
        for name in ("warmup_fraction", "label_smoothing", "dropout"):
            if not _is_number(value := getattr(self, name)) or not 0 <= value < 1:
                raise SpecError(
                    f"trainer jax: {name} must be a number from 0 to less than 1, not {value!r}"
                )


class JaxTrainer(Classifier):
    """Trains the network of this module with AdamW; see `Options` for what can be set.

    The learning rate rises linearly for `warmup_fraction` of all steps, then falls to zero along a
    cosine. Gradients longer than `clip_norm` are cut to it. Weight decay spares biases and norms.
    `dropout` leaves out pooled features; which ones follows from the seed and each record's
    `position`.

    Ranks divide each batch among them and average their gradients. Each computes on one device. A
    rank that loses another ends with an error from its next step, or JAX ends its process.
    """

    distributed = True
    options: Options

    def init(self, batch_spec: BatchSpec, options: Mapping[str, Any]) -> None:
        """Build the network with weights drawn from the seed, the same in every rank.

        Must come before any other computation with JAX in a process that is one of several ranks.
        Raises `SpecError` for options or batches that it cannot work with.
        """
        self.spec = batch_spec
        self.options = _options(options)
        channels = _check_batches(batch_spec)
        _join(batch_spec)
        with _one_thread():
            mesh = _mesh()
        self._everywhere, self._by_record = _shardings(mesh)
        platform = mesh.local_devices[0].platform
        self._step, self._predict = (
            _compiled(_step, (1,), platform),
            _compiled(_predict, (), platform),
        )
        if batch_spec.world > 1:
            with _silent():
                self._meet()
        network = Network(
            np.random.default_rng(batch_spec.seed), channels, len(batch_spec.classes), self.options
        )
        self._graph, state = nnx.split(network)
        schedule = self.options, batch_spec.total_steps
        params = jax.tree.map(np.asarray, nnx.to_pure_dict(state))
        # Every array of it starts at zero.
        moments = jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(_optimizer(*schedule).init, params),
        )
        self._state = self._placed({"model": params, "optimizer": moments})
        self._fixed = _Fixed(self._graph, *schedule, batch_spec.seed, self._everywhere)

    def step(self, batch: ModelBatch) -> Metrics:
        """`loss`, `accuracy` of the global batch before learning from it, and `learning_rate`."""
        assert self.spec.target is not None
        arrays = {**self._inputs(batch), "truth": batch[self.spec.target].astype(np.int32)}
        if self.options.dropout:
            arrays["position"] = batch["position"].astype(np.uint32)
        arrays = jax.tree.map(self._divided, arrays)
        try:
            self._state, metrics = self._step(self._fixed, self._state, arrays)
            return {name: float(value) for name, value in metrics.items()}
        except jax.errors.JaxRuntimeError as exc:
            if self.spec.world == 1:
                raise
            raise WorkerDiedError(
                f"rank {self.spec.rank} of {self.spec.world} could not finish a step with the "
                f"others: {str(exc).splitlines()[0]}"
            ) from exc

    def predict(self, batch: ModelBatch) -> dict[str, Array]:
        """`probabilities`, float32 (records, classes); each rank for itself.

        A batch that is shorter than the others is filled up with zeros, so that the network is
        compiled once for each length of records.
        """
        arrays = self._inputs(batch)
        records = len(next(iter(arrays.values())))
        missing = max(0, self.spec.batch_size - records)
        filled = {
            name: np.pad(value, [(0, missing)] + [(0, 0)] * (value.ndim - 1))
            for name, value in arrays.items()
        }
        found = self._predict(self._graph, jax.tree.map(_local, self._state["model"]), filled)
        return {"probabilities": np.array(found)[:records]}

    def state(self) -> State:
        """Copies of all arrays, by names such as `model/stem/kernel`, `optimizer/1/count`."""
        return {name: np.array(_local(leaf)) for name, leaf in _named(self._state)}

    def load(self, state: State) -> None:
        """Go on from `state`, of which copies are kept; `SpecError` if it is another network's."""
        expected = dict(_named(self._state))
        if wrong := _differences(expected, state):
            raise SpecError(
                "the state is not that of a network with these options, inputs and classes: "
                + "; ".join(wrong)
            )
        leaves = [np.array(state[name]) for name in expected]
        self._state = self._placed(jax.tree.unflatten(jax.tree.structure(self._state), leaves))

    def _inputs(self, batch: ModelBatch) -> dict[str, Array]:
        """`input` and, where records were padded, `mask`: as they are read, at most 32 bits."""
        (name,) = self.spec.inputs
        values = batch[name]
        dtype = np.complex64 if values.dtype.kind == "c" else np.float32
        arrays: dict[str, Array] = {"input": values.astype(dtype, copy=False)}
        if (mask := batch.get(f"{name}_mask")) is not None:
            arrays["mask"] = mask
        return arrays

    def _meet(self) -> None:
        """Add up a one from every rank, so that ranks that cannot connect fail here."""
        ones = self._divided(np.ones(1, np.float32))
        total = jax.jit(jnp.sum, out_shardings=self._everywhere)(ones)
        assert float(_local(total)) == self.spec.world

    def _placed(self, tree: Tree) -> Tree:
        """The same arrays in all ranks."""
        return jax.tree.map(lambda leaf: _shared(self._everywhere, np.asarray(leaf)), tree)

    def _divided(self, array: Array) -> jax.Array:
        """The global batch, of which every rank holds its own records."""
        return _shared(self._by_record, array)


# --- the options and the batches ---------------------------------------------------------------


def _options(given: Mapping[str, Any]) -> Options:
    names = [field.name for field in fields(Options)]
    if unknown := [name for name in given if name not in names]:
        raise SpecError(
            f"trainer jax has no option {', '.join(map(repr, unknown))}; it takes "
            f"{', '.join(names)}"
        )
    return Options(**given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_batches(spec: BatchSpec) -> int:
    """How many channels the stem sees."""
    check_classes(spec, "trainer jax")
    if len(spec.inputs) != 1:
        raise SpecError(
            f"trainer jax sees one input, not {', '.join(spec.inputs) or 'none'}; choose it with "
            "inputs"
        )
    if spec.world > 1 and spec.coordinator is None:
        raise SpecError(f"{spec.world} ranks need the address of a coordinator to meet at")
    (name,) = spec.inputs
    shape, dtype = spec.arrays[name].shape, np.dtype(spec.arrays[name].dtype)
    if dtype.kind not in "fc":
        raise SpecError(
            f"input {name!r} is {dtype}, and trainer jax takes float or complex values; read it "
            "as another dtype, for example field:samples:float32"
        )
    channels = shape[0] if len(shape) == 2 else 1
    if len(shape) not in (1, 2) or not channels:
        raise SpecError(
            f"input {name!r} has records of shape {shape}; trainer jax takes (channels, time) or "
            "(time,)"
        )
    return channels * (3 if dtype.kind == "c" else 1)


# --- the devices -------------------------------------------------------------------------------


def _join(spec: BatchSpec) -> None:
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


def _mesh() -> Mesh:
    """One device of each process: of several that a process sees, its share by rank.

    So ranks of one host that see the same GPUs compute on different ones.
    """
    devices: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        devices.setdefault(device.process_index, []).append(device)
    chosen = [devices[rank][rank % len(devices[rank])] for rank in sorted(devices)]
    return Mesh(np.array(chosen), ("data",))


def _shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """The same on every device, and divided along the record axis."""
    specs = PartitionSpec(), PartitionSpec("data")  # type: ignore[no-untyped-call]
    return NamedSharding(mesh, specs[0]), NamedSharding(mesh, specs[1])


def _shared(sharding: NamedSharding, array: Array) -> jax.Array:
    """A global array from what this rank holds of it."""
    found: jax.Array = jax.make_array_from_process_local_data(  # type: ignore[no-untyped-call]
        sharding, array
    )
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
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
def _silent() -> Iterator[None]:
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


def _local(leaf: jax.Array) -> jax.Array:
    """This rank's copy of an array that all ranks have."""
    found: jax.Array = leaf.addressable_data(0)
    return found


# --- the network -------------------------------------------------------------------------------


class Convolution(nnx.Module):
    """(records, time, channels) -> (records, ceil(time / stride), width), zeros all around.

    Output `j` is centred on input `j * stride`, so padding at the end of a record moves nothing.
    Weights are drawn as in K. He et al., "Delving deep into rectifiers" (ICCV 2015), by NumPy:
    the same on every device, and without compiling anything.
    """

    def __init__(
        self, rng: np.random.Generator, channels: int, width: int, kernel: int, stride: int = 1
    ) -> None:
        self.stride = stride
        scale = math.sqrt(2 / (kernel * channels))
        weights = scale * rng.standard_normal((kernel, channels, width))
        self.kernel = nnx.Param(weights.astype(np.float32))
        self.bias = nnx.Param(np.zeros(width, np.float32))

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        kernel = self.kernel[...]
        side = kernel.shape[0] // 2
        y = jax.lax.conv_general_dilated(
            x, kernel, (self.stride,), [(side, side)], dimension_numbers=("NWC", "WIO", "NWC")
        )
        return _zeroed(y + self.bias[...], mask)


class Norm(nnx.Module):
    """Each position over the root mean square of its channels, times a weight a channel."""

    def __init__(self, width: int) -> None:
        self.scale = nnx.Param(np.ones(width, np.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        power = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        scaled: jax.Array = x * jax.lax.rsqrt(power + NORM_EPSILON) * self.scale[...]
        return scaled


class Block(nnx.Module):
    """x -> x + convolutions of x. Positions at zero stay at zero up to a convolution."""

    def __init__(self, rng: np.random.Generator, width: int, kernel: int) -> None:
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.conv1 = Convolution(rng, width, width, kernel)
        self.conv2 = Convolution(rng, width, width, kernel)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        y = self.conv1(jax.nn.relu(self.norm1(x)), mask)
        return x + self.conv2(jax.nn.relu(self.norm2(y)), mask)


class Network(nnx.Module):
    """Logits (records, classes) of an input (records, channels, time) or (records, time).

    `mask`, bool (records, time), is True where a record is real. Masked positions are zeros to
    every convolution, and are left out of the mean.
    """

    def __init__(
        self, rng: np.random.Generator, channels: int, classes: int, options: Options
    ) -> None:
        width, kernel = options.width, options.kernel
        self.stem = Convolution(rng, channels, width, kernel, options.stride)
        self.blocks = nnx.List([Block(rng, width, kernel) for _ in range(options.blocks)])
        self.norm = Norm(width)
        head = rng.standard_normal((width, classes)) / width
        self.head = nnx.Param(head.astype(np.float32))
        self.bias = nnx.Param(np.zeros(classes, np.float32))

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, drop: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        x = _zeroed(_features(x), mask)
        mask = None if mask is None else mask[:, :: self.stem.stride]
        x = self.stem(x, mask)
        for block in self.blocks:
            x = block(x, mask)
        pooled = drop(_mean(jax.nn.relu(self.norm(x)), mask))
        logits: jax.Array = pooled @ self.head[...] + self.bias[...]
        return logits


def _features(x: jax.Array) -> jax.Array:
    """float32 (records, time, channels) of an input.

    Complex values come with their log power: the envelope tells modulations apart whatever the
    phase and carrier are, and a convolution has no square to find it with.
    """
    x = x if x.ndim == 3 else x[:, None]
    if jnp.iscomplexobj(x):
        power = jnp.square(x.real) + jnp.square(x.imag)
        x = jnp.concatenate([x.real, x.imag, jnp.log(power + SMALLEST_POWER)], axis=1)
    return jnp.swapaxes(x, 1, 2)


def _zeroed(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    return x if mask is None else jnp.where(mask[:, :, None], x, 0)


def _mean(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """(records, time, channels) -> (records, channels); masked positions are zero already."""
    if mask is None:
        return x.mean(axis=1)
    return x.sum(axis=1) / jnp.maximum(1, mask.sum(axis=1, dtype=jnp.float32))[:, None]


# --- a step ------------------------------------------------------------------------------------


@cache
def _compiled(function: Callable[..., Any], donated: tuple[int, ...], platform: str) -> Any:
    """A function of something fixed and of arrays, compiled once for each shape of these.

    On a CPU most of the time goes into library routines: what LLVM could still do to the code
    around them takes 1.7 of 5 seconds to compile, and makes a step no faster.
    """
    options = {"xla_backend_optimization_level": 1} if platform == "cpu" else None
    return jax.jit(function, static_argnums=0, donate_argnums=donated, compiler_options=options)


@dataclass(frozen=True)
class _Fixed:
    """What a step does not learn; compiled code is kept for each."""

    graph: nnx.GraphDef[Network]
    options: Options
    total_steps: int
    seed: int
    everywhere: NamedSharding


def _step(fixed: _Fixed, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """The next state, and `loss`, `accuracy` and `learning_rate` of this step."""
    options = fixed.options

    def loss_of(params: Tree) -> tuple[jax.Array, jax.Array]:
        network = nnx.merge(fixed.graph, params)
        drop = partial(_dropped, options.dropout, fixed.seed, batch.get("position"))
        logits = network(batch["input"], batch.get("mask"), drop)
        wanted = jax.nn.one_hot(batch["truth"], logits.shape[1])
        wanted = optax.smooth_labels(wanted, options.label_smoothing)
        right = jnp.argmax(logits, axis=1) == batch["truth"]
        return optax.softmax_cross_entropy(logits, wanted).mean(), right.mean()

    params, before = state["model"], state["optimizer"]
    (loss, accuracy), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, after = _optimizer(options, fixed.total_steps).update(gradients, before, params)
    rate = _learning_rate(options, fixed.total_steps, before[-1].count)
    found = (
        {"model": optax.apply_updates(params, updates), "optimizer": after},
        {"loss": loss, "accuracy": accuracy, "learning_rate": rate},
    )
    placed: tuple[Tree, Tree] = jax.lax.with_sharding_constraint(  # type: ignore[no-untyped-call]
        found, fixed.everywhere
    )
    return placed


def _dropped(rate: float, seed: int, positions: jax.Array | None, x: jax.Array) -> jax.Array:
    """Features (records, width) of which each is left out with a probability of `rate`."""
    if positions is None:
        return x
    key = jax.random.key(seed)
    kept = jax.vmap(
        lambda position: jax.random.bernoulli(
            jax.random.fold_in(key, position), 1 - rate, x.shape[1:]
        )
    )(positions)
    return jnp.where(kept, x / (1 - rate), 0)


def _predict(graph: nnx.GraphDef[Network], params: Tree, batch: Tree) -> jax.Array:
    """Probabilities (records, classes)."""
    network = nnx.merge(graph, params)
    return jax.nn.softmax(network(batch["input"], batch.get("mask"), lambda pooled: pooled))


def _optimizer(options: Options, total_steps: int) -> optax.GradientTransformation:
    """AdamW (I. Loshchilov and F. Hutter, "Decoupled weight decay regularization", ICLR 2019).

    The last part of its state is how many steps were taken.
    """
    return optax.chain(
        optax.clip_by_global_norm(options.clip_norm),
        optax.scale_by_adam(),
        optax.add_decayed_weights(options.weight_decay, mask=_decays),
        optax.scale_by_learning_rate(partial(_learning_rate, options, total_steps)),
    )


def _decays(params: Tree) -> Tree:
    """Which parameters are weights of sums, rather than biases or norms."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _learning_rate(options: Options, total_steps: int, step: jax.Array) -> jax.Array:
    """Rate of a step counted from 0: linear up to the peak, then down half a cosine."""
    warmup = round(options.warmup_fraction * total_steps)
    rising = (step + 1) / (warmup + 1)
    done = jnp.clip((step - warmup) / max(1, total_steps - warmup), 0, 1)
    falling = (1 + jnp.cos(math.pi * done)) / 2
    return jnp.asarray(options.learning_rate * jnp.where(step < warmup, rising, falling))


# --- the state ---------------------------------------------------------------------------------


def _named(tree: Tree) -> list[tuple[str, jax.Array]]:
    """The leaves of a tree with their paths, in the tree's own order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    name_of = partial(jax.tree_util.keystr, simple=True, separator="/")
    return [(name_of(path), leaf) for path, leaf in leaves]


def _differences(expected: Mapping[str, jax.Array], state: State) -> list[str]:
    """What is wrong with a state, a line each."""
    wrong = [f"{name} is missing" for name in expected if name not in state]
    wrong += [f"{name} is not part of it" for name in state if name not in expected]
    for name, leaf in expected.items():
        if name in state and (state[name].shape, state[name].dtype) != (leaf.shape, leaf.dtype):
            wrong.append(
                f"{name} is {state[name].dtype} {state[name].shape} instead of {leaf.dtype} "
                f"{leaf.shape}"
            )
    return wrong
