"""Step: one training step over the whole mesh, as one compiled program.

Loss and gradients are computed in one `shard_map`: every device computes the losses of its own slots, and the stages
and the ring sum each weight's gradient over all devices. The optimiser updates each shard on its own device.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import striped_attention as sa
from striped_attention.core.mask import Mask
from striped_attention.data import Batch
from striped_attention.models.config import ModelConfig
from striped_attention.models.llama import Compute, init, weighted_loss
from striped_attention.models.stages import AXES
from striped_attention.runtime.compiler import compiler_options
from striped_attention.training.config import TrainConfig
from striped_attention.training.settle import settle

REPLICATED = PartitionSpec()


class State(NamedTuple):
    """The training state: step count, weights and optimiser state."""

    step: Any
    weights: Any
    optimiser: Any


class Inputs(NamedTuple):
    """A batch on the mesh, in layout order; [batch, slots] each. A nonzero entry of `stop` [devices] stops the run."""

    tokens: Any
    targets: Any
    weights: Any
    mask: Mask
    stop: Any


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up, then cosine decay to a tenth of the peak, or constant."""
    peak = config.learning_rate
    warmup = min(100, config.steps // 10) if config.warmup is None else config.warmup
    if config.schedule == "constant":
        return optax.schedules.warmup_constant_schedule(peak / (warmup + 1), peak, warmup)
    return optax.schedules.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, config.steps, peak / 10)


def make_optimiser(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with gradient clipping. Weight decay applies to matrices, not to norms and biases."""

    def matrices(weights: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: not path[-1].key.endswith(("norm", "bias")), weights)

    adamw = optax.adamw(learning_rate(config), b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A model, its optimiser and a mesh, ready to train. `documents`: whether the data consists of packed documents.

    `attend` replaces attention in tests. The strategy "auto" of the configuration is settled for the mesh's devices.
    """

    config: TrainConfig
    mesh: Mesh
    attend: Any = None
    documents: bool = True

    def __post_init__(self) -> None:
        device, sizes = self.mesh.devices.flat[0], dict(self.mesh.shape)
        settled = settle(self.config, sizes, self.documents, device.platform, device.device_kind)
        object.__setattr__(self, "config", settled)

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def platform(self) -> str:
        """The platform of the mesh's devices, which need not exist on this machine."""
        return self.mesh.devices.flat[0].platform

    @functools.cached_property
    def compute(self) -> Compute:
        config, devices = self.config, self.mesh.shape[AXES.sequence]
        tile = None if config.tile is None else (config.tile, config.tile)
        assert config.chunk is not None, "settled"
        return Compute(
            layout=config.make_layout(devices, self.documents, self.platform, self.mesh.devices.flat[0].device_kind),
            devices=devices,
            length=config.sequence_length,
            dtype=jnp.dtype(config.dtype),
            remat=config.remat,
            chunk=config.chunk,
            kernel=config.kernel,
            tile=tile,
            deterministic=config.deterministic,
            strategy=config.make_strategy(devices),
        )

    @functools.cached_property
    def optimiser(self) -> optax.GradientTransformation:
        return make_optimiser(self.config)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        with jax.numpy_dtype_promotion("standard"):
            return float(learning_rate(self.config)(step))

    @functools.cached_property
    def specs(self) -> Any:
        """How the weights are sharded over the mesh."""
        return self.model.specs(self.mesh.size)

    @functools.cached_property
    def state(self) -> State:
        """The state as shapes, dtypes and shardings, without values."""
        shapes = jax.eval_shape(self._fresh, jax.random.key(0))
        optimiser = optax.tree.map_params(
            *(self.optimiser, lambda _, spec: spec, shapes.optimiser, self.specs),
            transform_non_params=lambda _: REPLICATED,
        )
        specs = State(REPLICATED, self.specs, optimiser)
        place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding(spec))  # noqa: E731
        return jax.tree.map(place, shapes, specs)

    @functools.cached_property
    def fresh(self) -> Any:
        """`fresh(key) -> state`, compiled at its first call."""
        return jax.jit(self._fresh, out_shardings=jax.tree.map(lambda x: x.sharding, self.state))

    def fresh_state(self) -> State:
        """The state before the first step; the same values on every mesh."""
        return self.fresh(jax.random.key(self.config.seed))

    def start_state(self, weights: Any) -> State:
        """The state before the first step of a run that starts from these weights, which are sharded as in `state`."""
        shardings = (self.state.step.sharding, jax.tree.map(lambda x: x.sharding, self.state.optimiser))
        fresh = lambda weights: (jnp.zeros((), jnp.int32), self.optimiser.init(weights))  # noqa: E731
        step, optimiser = jax.jit(fresh, out_shardings=shardings)(weights)
        return State(step, weights, optimiser)

    def _fresh(self, key: Any) -> State:
        weights = init(self.model, key)
        return State(jnp.zeros((), jnp.int32), weights, self.optimiser.init(weights))

    @functools.cached_property
    def step(self) -> Any:
        """`step(state, inputs) -> state, metrics`, compiled at its first call. It donates the old state's buffers."""
        shardings = jax.tree.map(lambda x: x.sharding, self.state)
        everywhere = self._sharding(REPLICATED)
        return jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, everywhere))

    @functools.cached_property
    def compiled(self) -> Any:
        """The step, compiled ahead of time."""
        options = compiler_options(deterministic=self.config.deterministic, device=self.mesh.devices.flat[0])
        return self.step.lower(self.state, self.inputs).compile(compiler_options=options)

    def _step(self, state: State, inputs: Inputs) -> tuple[State, dict[str, Any]]:
        loss, stop, gradients = self.loss_and_gradients(state.weights, inputs)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes, which users may have disabled
            updates, optimiser = self.optimiser.update(gradients, state.optimiser, state.weights)
        # An update of 0 must preserve every bit: x + 0 turns -0.0 into 0.0, and subnormals may be flushed to zero.
        weights = jax.tree.map(lambda x, update: jnp.where(update == 0, x, x + update), state.weights, updates)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradients), "stop": stop}
        return State(state.step + 1, weights, optimiser), metrics

    def loss_and_gradients(self, weights: Any, inputs: Inputs) -> tuple[Any, Any, Any]:
        """Return the mean loss over all targets, the number of devices that request a stop, and the loss's gradient."""
        tokens = AXES.tokens
        mask_specs = jax.tree.map(lambda _: tokens, inputs.mask)
        specs = Inputs(tokens, tokens, tokens, mask_specs, PartitionSpec(AXES.everything))

        def part(weights: Any, inputs: Inputs) -> Any:
            def total(weights: Any) -> Any:
                of_model = (self.model, self.compute, weights, self.specs)
                of_batch = (inputs.tokens, inputs.targets, inputs.weights, inputs.mask)
                return weighted_loss(*of_model, *of_batch, self.attend)

            return jax.value_and_grad(total)(weights)

        def shard(weights: Any, inputs: Inputs) -> Any:
            loss, gradients = _accumulated(part, self.config.accumulate, weights, inputs)
            loss, targets, stop = lax.psum((loss, jnp.sum(inputs.weights), inputs.stop[0]), AXES.everything)
            share = jnp.where(targets > 0, 1 / targets, 0)
            return loss * share, stop, jax.tree.map(lambda g: g * share, gradients)

        out = (REPLICATED, REPLICATED, self.specs)
        return jax.shard_map(shard, mesh=self.mesh, in_specs=(self.specs, specs), out_specs=out)(weights, inputs)

    @functools.cached_property
    def rows(self) -> range:
        """The rows of a batch that this process's devices hold."""
        held = self._sharding(AXES.tokens).addressable_devices_indices_map(self._shape).values()
        bounds = [index[0].indices(self.config.batch) for index in held if index is not None]
        return range(min(first for first, _, _ in bounds), max(last for _, last, _ in bounds))

    def place(self, batch: Batch) -> Inputs:
        """Put a batch (this process's rows, in sequence order) on the mesh, in layout order."""
        layout, devices = self.compute.layout, self.compute.devices
        tokens, targets, weights = (layout.permute(x, devices, 1) for x in (batch.tokens, batch.targets, batch.weights))
        mask = sa.documents(batch.segments).permute(layout, devices) if self.documents else sa.causal()

        def put(x: np.ndarray) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                first, last, _ = index[0].indices(self.config.batch)
                return x[first - self.rows.start : last - self.rows.start, index[1]]

            return jax.make_array_from_callback(self._shape, self._sharding(AXES.tokens), part)

        return Inputs(put(tokens), put(targets), put(weights), jax.tree.map(put, mask), self.flags(False))

    @property
    def inputs(self) -> Inputs:
        """A batch on the mesh as shapes, dtypes and shardings, without values."""
        layout, devices, length = self.compute.layout, self.compute.devices, self.compute.length

        def tokens(dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(self._shape, dtype, sharding=self._sharding(AXES.tokens))

        mask = sa.causal()
        if self.documents:
            ids = jax.ShapeDtypeStruct((self._shape[0], length), jnp.int32)
            mask = jax.eval_shape(lambda ids: sa.documents(ids).permute(layout, devices), ids)
            mask = jax.tree.map(lambda _: tokens(jnp.int32), mask)
        everybody = self._sharding(PartitionSpec(AXES.everything))
        stop = jax.ShapeDtypeStruct((self.mesh.size,), jnp.int32, sharding=everybody)
        return Inputs(tokens(jnp.int32), tokens(jnp.int32), tokens(jnp.float32), mask, stop)

    def flags(self, stop: bool) -> jax.Array:
        """This process's stop request, for `Inputs.stop`: all processes see every request after the same step."""
        mine = np.full(self.mesh.size, stop, np.int32)
        spec = PartitionSpec(AXES.everything)
        return jax.make_array_from_callback(mine.shape, self._sharding(spec), lambda index: mine[index])

    @property
    def _shape(self) -> tuple[int, int]:
        return (self.config.batch, self.compute.padded_length)

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)


def _accumulated(function: Any, parts: int, weights: Any, inputs: Inputs) -> Any:
    """Sum `function(weights, inputs)`, a pytree like (scalar, weights), over `parts` equal parts of the batch."""
    if parts == 1:
        return function(weights, inputs)
    arrays = inputs._replace(stop=())
    split = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), arrays)
    nothing = (jnp.zeros_like(inputs.weights, shape=()), jax.tree.map(jnp.zeros_like, weights))

    def add(total: Any, part: Any) -> Any:
        return jax.tree.map(jnp.add, total, function(weights, part)), None

    return lax.scan(add, nothing, split)[0]
