"""Pipeline parallelism: layers on different devices work on different microbatches at once.

    step        0    1    2    3    4      M = 3 microbatches, N = 3 stages,
    stage 0     m0   m1   m2   .    .      M + N - 1 steps.
    stage 1     .    m0   m1   m2   .
    stage 2     .    .    m0   m1   m2     Each stage works on the previous stage's result of the
                                           previous step.

The layers, or stages, are copies of one child "layer". The leading axis of their parameters is
sharded over the mesh axis "pipeline", or as logical axis rules map that name. In each step, all
stages run under one `vmap`, on microbatches that a schedule assigns to them. A buffer with a
sharded axis of stages holds their inputs; after the step it is shifted along that axis, so that
each device passes its part to the next one. At the dots, a stage computes on rows that are
discarded. On any mesh, the result equals that of running the layers in sequence.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from weft.config import REQUIRED, Configurable, Required
from weft.core.logical import names_to_mesh_axes
from weft.core.spmd import axes_of, constrain, get_global_mesh
from weft.errors import ArgumentShapeError, LayerConfigError
from weft.hierarchy import parameter_spec, transforms
from weft.hierarchy.context import InvocationContext, OutputCollection
from weft.hierarchy.module import Module
from weft.hierarchy.repeat import Repeat
from weft.typing import PartitionSpec, Tensor

PIPELINE_AXIS = "pipeline"
"""Name of the stage axis: a mesh axis, unless logical axis rules map it."""

StepFn = Callable[[Any, Any], tuple[Any, Any]]
"""Runs all stages for one step: takes their inputs, arrays `(num_stages, ...)`, and the step's
entry of `xs`; returns their outputs and values to stack."""


def stage_layout() -> Any:
    """Returns the sharding of the stage axis by the mesh and rules of the context."""
    mesh = get_global_mesh()
    (entry,) = names_to_mesh_axes((PIPELINE_AXIS,))
    is_absent = mesh is None or (entry == PIPELINE_AXIS and entry not in mesh.axis_names)
    return PartitionSpec.UNCONSTRAINED if is_absent else entry


def shard_stages(x: object) -> Any:
    """Shards the first axis of all arrays in a pytree as the stage axis.

    Raises MeshError if the mesh lacks an axis that the rules assign to stages.
    """
    entry = stage_layout()

    def constrained(x: jax.Array) -> jax.Array:
        others = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        return constrain(x, PartitionSpec(entry, *others))

    return jax.tree.map(constrained, x)


class BaseSchedule(Configurable):
    """Base of schedules. A subclass defines `scan`."""

    class Config(Configurable.Config):
        """Configures a BaseSchedule; the pipeline sets both fields."""

        num_stages: Required[int] = REQUIRED
        num_microbatches: Required[int] = REQUIRED

    @property
    def num_stages(self) -> int:
        return self.config.num_stages

    @property
    def num_microbatches(self) -> int:
        return self.config.num_microbatches

    @property
    def num_iterations(self) -> int:
        """Number of steps."""
        return self.num_microbatches + self.num_stages - 1

    def scan(
        self, fn: StepFn, *, carry: Any, state: InvocationContext, xs: Any, **scan_kwargs: Any
    ) -> tuple[Any, Any]:
        """Runs all microbatches through all stages.

        Args:
          carry: the microbatches, arrays `(num_microbatches, ...)`.
          state: the context of the stages. Its outputs are stacked along an axis of steps,
            `(num_iterations, num_stages, ...)`.
          xs: values per step, arrays `(num_iterations, ...)`.
          **scan_kwargs: as for `weft.hierarchy.transforms.scan`.

        Returns the outputs of the last stage, and the stacked values.
        """
        raise NotImplementedError(type(self))

    def _initial_inputs(self, microbatches: object) -> Any:
        """Returns real rows as initial input of all stages, so that none fails on them."""
        n = self.num_stages
        work = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (n, *x.shape[1:])), microbatches)
        return shard_stages(work)


class GPipeSchedule(BaseSchedule):
    """Schedule that runs all microbatches in sequence (Huang et al., 2019).

    Each device holds the inputs and results of all microbatches.
    """

    def scan(
        self, fn: StepFn, *, carry: Any, state: InvocationContext, xs: Any, **scan_kwargs: Any
    ) -> tuple[Any, Any]:
        def body(work: Any, x: tuple[Any, Any]) -> tuple[Any, Any]:
            entering, x = x
            work = jax.tree.map(lambda a, b: _replace_stage(b, 0, a[None]), entering, work)
            done, y = fn(shard_stages(work), x)
            # The shift wraps around; the next microbatch replaces the values at the first stage.
            passed_on = _shift_stages(shard_stages(done), 1)
            return passed_on, (jax.tree.map(lambda x: x[0], passed_on), y)

        # Rows that enter after the last microbatch are discarded.
        at = jnp.minimum(jnp.arange(self.num_iterations), self.num_microbatches - 1)
        entering = jax.tree.map(lambda x: x[at], carry)
        work, xs, length = self._initial_inputs(carry), (entering, xs), self.num_iterations
        _, (results, ys) = transforms.scan(
            state, body, work, xs, state_axis=None, length=length, **scan_kwargs
        )
        return jax.tree.map(lambda x: x[self.num_stages - 1 :], results), ys


class StreamSchedule(BaseSchedule):
    """Schedule in the order of GPipe, with inputs and results sharded over the stages.

    Each device holds `num_microbatches / num_stages` microbatches. They move towards the first
    stage, one stage per step, and results follow them.
    """

    def __init__(self, cfg: BaseSchedule.Config):
        super().__init__(cfg)
        if cfg.num_microbatches % cfg.num_stages:
            raise LayerConfigError(
                f"num_microbatches={cfg.num_microbatches} is not a multiple of num_stages="
                f"{cfg.num_stages}, which a StreamSchedule needs; set a multiple, or use a "
                "GPipeSchedule."
            )

    def scan(
        self, fn: StepFn, *, carry: Any, state: InvocationContext, xs: Any, **scan_kwargs: Any
    ) -> tuple[Any, Any]:
        n, per_stage = self.num_stages, self.num_microbatches // self.num_stages

        def body(buffers: Any, x: tuple[Any, Any]) -> tuple[Any, Any]:
            (work, stream), (step, x) = buffers, x
            column = step % per_stage
            passing = jax.tree.map(lambda s: s[:, column], stream)
            work = jax.tree.map(lambda w, p: _replace_stage(w, 0, p), work, passing)
            done, y = fn(shard_stages(work), x)
            done = shard_stages(done)
            # The first stage took its microbatch; the others move up, and the last result follows.
            moved = _shift_stages(passing, -1)
            moved = jax.tree.map(lambda m, d: _replace_stage(m, n - 1, d), moved, done)
            stream = jax.tree.map(lambda s, m: s.at[:, column].set(m), stream, moved)
            return (_shift_stages(done, 1), shard_stages(stream)), y

        stream = jax.tree.map(lambda x: x.reshape(n, per_stage, *x.shape[1:]), carry)
        buffers = (self._initial_inputs(carry), shard_stages(stream))
        steps = jnp.arange(self.num_iterations)
        (_, stream), ys = transforms.scan(
            state, body, buffers, (steps, xs), state_axis=None, **scan_kwargs
        )

        def collected(x: jax.Array) -> jax.Array:
            # Results came n - 1 steps after the inputs whose places they take.
            return jnp.roll(x, 1 - n, axis=1).reshape(-1, *x.shape[2:])

        return jax.tree.map(collected, stream), ys


def _shift_stages(x: object, by: int) -> Any:
    """Passes the values of each stage to the next, or for -1 to the previous one."""
    return jax.tree.map(lambda x: jnp.roll(x, by, axis=0), x)


def _replace_stage(x: jax.Array, stage: int, by: jax.Array) -> jax.Array:
    """Replaces the values of one stage without communication between stages."""
    index = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0],) + (1,) * (x.ndim - 1), 0)
    return jnp.where(index == stage, by, x)


def transpose_to_pipeline_stage_inputs(
    x: Tensor, partition_spec: PartitionSpec | None = None
) -> Tensor:
    """Converts an axis of microbatches to an axis of steps.

    Args:
      x: `Num[Array, "num_microbatches num_stages *shape"]`.

    Returns `Num[Array, "num_microbatches+num_stages-1 num_stages *shape"]`: in step `t`, stage `n`
    works on microbatch `t - n`; 0 for idle stages.

    >>> transpose_to_pipeline_stage_inputs(jnp.array([[1, 2], [3, 4]])).tolist()
    [[1, 0], [3, 2], [0, 4]]
    """
    n = x.shape[1]
    padded = jnp.concatenate([x, jnp.zeros((n - 1, *x.shape[1:]), x.dtype)])
    shifted = jax.vmap(lambda x, by: jnp.roll(x, by, axis=0), in_axes=(1, 0), out_axes=1)
    return parameter_spec.maybe_shard(shifted(padded, jnp.arange(n)), partition_spec)


def transpose_from_pipeline_stage_outputs(
    x: Tensor, partition_spec: PartitionSpec | None = None
) -> Tensor:
    """Converts an axis of steps to an axis of microbatches.

    Args:
      x: `Num[Array, "num_microbatches+num_stages-1 num_stages *shape"]`.

    Returns `Num[Array, "num_microbatches num_stages *shape"]`: for microbatch `m`, the result of
    stage `n` in step `m + n`.

    >>> transpose_from_pipeline_stage_outputs(jnp.array([[1, 0], [3, 2], [0, 4]])).tolist()
    [[1, 2], [3, 4]]
    """
    steps, n = x.shape[:2]
    shifted = jax.vmap(lambda x, by: jnp.roll(x, -by, axis=0), in_axes=(1, 0), out_axes=1)
    return parameter_spec.maybe_shard(shifted(x, jnp.arange(n))[: steps - n + 1], partition_spec)


class Pipeline(Repeat):
    """Layer that runs a child "layer" `num_layers` times, as stages of a pipeline.

    A subclass defines `forward`, which calls `_run`.

    >>> from weft.hierarchy.layers import Linear
    >>> class PipelinedLinear(Pipeline):
    ...     def forward(self, x):
    ...         return self._run(lambda x, _: (self.layer(x), None), x).carry
    >>> cfg = PipelinedLinear.default_config().set(num_layers=3, num_microbatches=2, name="stack")
    >>> _ = cfg.set(layer=Linear.default_config().set(input_dim=4, output_dim=4))
    >>> cfg.instantiate(parent=None).create_parameter_specs_recursively()["layer"]["weight"].shape
    (3, 4, 4)
    """

    class Config(Repeat.Config):
        """Configures a Pipeline."""

        num_microbatches: Required[int] = REQUIRED
        """Number of parts of a batch, ideally several times the number of stages: of
        `num_microbatches + num_layers - 1` steps, a stage is idle in `num_layers - 1`."""
        schedule: BaseSchedule.Config = GPipeSchedule.default_config()

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name in ("num_layers", "num_microbatches"):
            if getattr(cfg, name) < 1:
                raise LayerConfigError(
                    f"{self.path()}: {name}={getattr(cfg, name)}; expected at least 1."
                )
        if not issubclass(getattr(cfg.schedule, "klass", object), BaseSchedule):
            raise LayerConfigError(
                f"{self.path()}: schedule={cfg.schedule!r} is not the config of a schedule; "
                "expected GPipeSchedule.default_config() or StreamSchedule.default_config()."
            )
        try:
            self._schedule: BaseSchedule = cfg.schedule.clone(
                num_stages=cfg.num_layers, num_microbatches=cfg.num_microbatches
            ).instantiate()
        except LayerConfigError as error:
            raise LayerConfigError(f"{self.path()}: {error}") from None

    def create_parameter_specs_recursively(self) -> dict[str, Any]:
        """Returns the specs, with the axis of stages named "pipeline"."""
        specs = super().create_parameter_specs_recursively()
        specs["layer"] = jax.tree.map(
            lambda spec: parameter_spec.with_leading_axis_name(spec, PIPELINE_AXIS), specs["layer"]
        )
        return specs

    def _run(
        self, fn: Callable[[Any, Any], tuple[Any, Any]], carry: Any = None, *, xs: Any = None
    ) -> Repeat.Output:
        """Runs the pipeline.

        Args:
          fn: takes a microbatch of the carry and a slice of `xs`; returns the next carry and values
            to stack. It calls `self.layer`, which has the parameters of the stage, and a key and
            outputs per stage and microbatch.
          carry: the batch, a pytree of arrays `(batch, ...)`.
          xs: a pytree of arrays with a leading axis of stages, the same for all microbatches.

        Returns:
          The output of the last stage, and the stacked values, `(num_layers, batch, ...)` if `fn`
          returns arrays with a microbatch's rows.

          Summaries of stage i are added under "layer{i}", merged over its microbatches. State
          updates are stacked under "layer": the mean over microbatches, which all start from the
          same state; for integers, the last. Module outputs that `drop_output` keeps are stacked
          under "layer" with axes of stages and microbatches; scalars, and names that end in
          "loss", are averaged over microbatches.

        Raises ArgumentShapeError if the batch does not divide into microbatches.
        """
        context = self.get_invocation_context()
        layer_context = context.add_child("layer", prng_key=context.prng_key)
        inner = layer_context.fork()
        run_stages = transforms.vmap(
            fn, axis_size=self.config.num_layers, spmd_axis_name=axes_of(stage_layout()) or None
        )
        carry, ys = self._schedule.scan(
            lambda work, _: run_stages(work, xs),
            carry=jax.tree.map(self._split_microbatches, carry),
            state=inner,
            xs=None,
            **self._scan_kwargs(),
        )
        outputs = jax.tree.map(transpose_from_pipeline_stage_outputs, inner.output_collection)
        self._add_outputs(layer_context, self._reduce_microbatches(outputs))
        merge = jax.vmap(_merge_microbatches, in_axes=1)
        stacked = jax.tree.map(lambda y: merge(transpose_from_pipeline_stage_outputs(y)), ys)
        return Repeat.Output(jax.tree.map(_merge_microbatches, carry), stacked)

    def _run_sequentially(self, fn: Callable[..., Any], carry: Any, *, xs: Any) -> Repeat.Output:
        """Runs the stages in sequence on the whole batch, as a `Repeat` does."""
        return super()._run(fn, carry, xs=xs)

    def _split_microbatches(self, x: Tensor) -> Tensor:
        m = self.config.num_microbatches
        if x.ndim == 0 or x.shape[0] % m:
            raise ArgumentShapeError(
                f"{self.path()}: a batch of shape {x.shape} does not divide into "
                f"num_microbatches={m}; expected a multiple of {m} rows."
            )
        # Row i goes to microbatch i % m, so that rows stay on their devices and each microbatch is
        # sharded like the batch.
        return jnp.moveaxis(x.reshape(-1, m, *x.shape[1:]), 1, 0)

    def _reduce_microbatches(self, outputs: OutputCollection) -> OutputCollection:
        summaries, m = outputs.summaries, self.config.num_microbatches
        if jax.tree.leaves(summaries):
            parts = [jax.tree.map(lambda x, i=i: x[i], summaries) for i in range(m)]
            summaries = transforms.reduce_summaries(parts)
        return OutputCollection(
            summaries,
            jax.tree.map(_reduce_state_update, outputs.state_updates),
            jax.tree_util.tree_map_with_path(_move_stages_first, outputs.module_outputs),
        )


def _merge_microbatches(x: Tensor) -> Tensor:
    return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])


def _reduce_state_update(x: Tensor) -> Tensor:
    return jnp.mean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[-1]


def _move_stages_first(path: jax.tree_util.KeyPath, x: Tensor) -> Tensor:
    """Moves the axis of stages first, or averages a loss over microbatches."""
    # A stage that is a loop has a loss per layer.
    if x.ndim == 2 or str(getattr(path[-1], "key", "")).endswith("loss"):
        return jnp.mean(x, axis=0)
    return jnp.moveaxis(x, 1, 0)
