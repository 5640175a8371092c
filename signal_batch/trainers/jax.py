"""The built-in trainer `jax`: a small 1-D residual network in Flax NNX, trained with Optax.

It classifies one input of shape (channels, time) or (time,), float or complex; a complex channel
becomes two, its real and its imaginary part, and a third, its log power (see `jax_network`)::

    stem      convolution with a stride
    blocks    each: normalise, ReLU, convolve, normalise, ReLU, convolve; added to what went in
    head      normalise, ReLU, mean over time, dense

The blocks are those of K. He et al., "Identity mappings in deep residual networks" (ECCV 2016),
with RMS norms over the channels of one position (B. Zhang and R. Sennrich, "Root mean square layer
normalization", NeurIPS 2019) in place of batch norms: what comes out for a record does not depend
on the other records of its batch, on how a batch is divided among ranks, or on padding.

Everything that was learned is in the arrays of the state, and a step is a pure function of them
and of the batch. On a CPU the same steps give the same bits on any number of cores, as JAX is told
to compute on one: see `jax_devices`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped,unused-ignore]
from flax import nnx
from jax.sharding import NamedSharding

from signal_batch.batches import Array
from signal_batch.errors import SpecError, WorkerDiedError
from signal_batch.trainers import jax_devices as devices
from signal_batch.trainers.jax_network import Network, Options
from signal_batch.training import BatchSpec, Classifier, Metrics, ModelBatch, State, check_classes

Tree: TypeAlias = Any  # nested dicts and tuples of arrays, as JAX passes them around


class JaxTrainer(Classifier):
    """Trains the network of `jax_network` with AdamW; see `Options` for what can be set.

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
        devices.join(batch_spec)
        with devices.one_thread():
            mesh = devices.mesh()
        self._everywhere, self._by_record = devices.shardings(mesh)
        platform = mesh.local_devices[0].platform
        self._step, self._predict = (
            _compiled(_step, (1,), platform),
            _compiled(_predict, (), platform),
        )
        if batch_spec.world > 1:
            with devices.silent():
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
        found = self._predict(
            self._graph, jax.tree.map(devices.local, self._state["model"]), filled
        )
        return {"probabilities": np.array(found)[:records]}

    def state(self) -> State:
        """Copies of all arrays, by names such as `model/stem/kernel`, `optimizer/1/count`."""
        return {name: np.array(devices.local(leaf)) for name, leaf in _named(self._state)}

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
        assert float(devices.local(total)) == self.spec.world

    def _placed(self, tree: Tree) -> Tree:
        """The same arrays in all ranks."""
        return jax.tree.map(lambda leaf: devices.shared(self._everywhere, np.asarray(leaf)), tree)

    def _divided(self, array: Array) -> jax.Array:
        """The global batch, of which every rank holds its own records."""
        return devices.shared(self._by_record, array)


# --- the options and the batches ---------------------------------------------------------------


def _options(given: Mapping[str, Any]) -> Options:
    names = [field.name for field in fields(Options)]
    if unknown := [name for name in given if name not in names]:
        raise SpecError(
            f"trainer jax has no option {', '.join(map(repr, unknown))}; it takes "
            f"{', '.join(names)}"
        )
    return Options(**given)


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
