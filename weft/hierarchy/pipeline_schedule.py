"""Pipeline schedules: the order in which stages work on microbatches.

    step        0    1    2    3    4      M = 3 microbatches, N = 3 stages,
    stage 0     m0   m1   m2   .    .      M + N - 1 steps.
    stage 1     .    m0   m1   m2   .
    stage 2     .    .    m0   m1   m2     Each stage works on the previous stage's result of the
                                           previous step.

A buffer with a sharded axis of stages holds the input of each stage. After each step it is shifted
along that axis, so that each device passes its part to the next one. At the dots, a stage computes
on rows that are discarded.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from weft.config import REQUIRED, Configurable, Required, config_class
from weft.core.layout import constrain, get_global_mesh
from weft.core.logical import names_to_mesh_axes
from weft.errors import LayerConfigError
from weft.hierarchy import transforms
from weft.hierarchy.context import InvocationContext
from weft.typing import PartitionSpec

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


def shard_stages(x: Any) -> Any:
    """Shards the first axis of all arrays in a pytree as the stage axis.

    Raises:
      MeshError: if the mesh lacks an axis that the rules assign to stages.
    """
    entry = stage_layout()

    def constrained(x: jax.Array) -> jax.Array:
        others = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        return constrain(x, PartitionSpec(entry, *others))

    return jax.tree.map(constrained, x)


class BaseSchedule(Configurable):
    """Base of schedules. A subclass defines `scan`."""

    @config_class
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
          fn: runs all stages for one step.
          carry: the microbatches, arrays `(num_microbatches, ...)`.
          state: the context of the stages. Its outputs are stacked along an axis of steps,
            `(num_iterations, num_stages, ...)`.
          xs: values per step, arrays `(num_iterations, ...)`.
          **scan_kwargs: as for `weft.hierarchy.transforms.scan`.

        Returns:
          The outputs of the last stage, and the stacked values.
        """
        raise NotImplementedError(type(self))

    def _loop(
        self,
        body: Callable[..., Any],
        carry: Any,
        state: InvocationContext,
        xs: Any,
        scan_kwargs: dict[str, Any],
    ) -> tuple[Any, Any]:
        return transforms.scan(
            state, body, carry, xs, state_axis=None, length=self.num_iterations, **scan_kwargs
        )

    def _first_work(self, microbatches: Any) -> Any:
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
        def body(work: Any, x: Any) -> tuple[Any, Any]:
            entering, x = x
            work = jax.tree.map(lambda a, b: _replaced(b, 0, a[None]), entering, work)
            done, y = fn(shard_stages(work), x)
            # The shift wraps around; the next microbatch replaces the values at the first stage.
            passed_on = _shifted(shard_stages(done), 1)
            return passed_on, (jax.tree.map(lambda x: x[0], passed_on), y)

        # Rows that enter after the last microbatch are discarded.
        at = jnp.minimum(jnp.arange(self.num_iterations), self.num_microbatches - 1)
        entering = jax.tree.map(lambda x: x[at], carry)
        _, (left, ys) = self._loop(
            body, self._first_work(carry), state, (entering, xs), scan_kwargs
        )
        return jax.tree.map(lambda x: x[self.num_stages - 1 :], left), ys


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

        def body(buffers: Any, x: Any) -> tuple[Any, Any]:
            (work, stream), (step, x) = buffers, x
            column = step % per_stage
            passing = jax.tree.map(lambda s: s[:, column], stream)
            work = jax.tree.map(lambda w, p: _replaced(w, 0, p), work, passing)
            done, y = fn(shard_stages(work), x)
            done = shard_stages(done)
            # The first stage took its microbatch; the others move up, and the last result follows.
            moved = jax.tree.map(lambda p, d: _replaced(p, n - 1, d), _shifted(passing, -1), done)
            stream = jax.tree.map(lambda s, m: s.at[:, column].set(m), stream, moved)
            return (_shifted(done, 1), shard_stages(stream)), y

        stream = jax.tree.map(lambda x: x.reshape(n, per_stage, *x.shape[1:]), carry)
        buffers = (self._first_work(carry), shard_stages(stream))
        steps = jnp.arange(self.num_iterations)
        (_, stream), ys = self._loop(body, buffers, state, (steps, xs), scan_kwargs)

        def collected(x: jax.Array) -> jax.Array:
            # Results came n - 1 steps after the inputs whose places they take.
            return jnp.roll(x, 1 - n, axis=1).reshape(-1, *x.shape[2:])

        return jax.tree.map(collected, stream), ys


def _shifted(x: Any, by: int) -> Any:
    """Passes the values of each stage to the next, or for -1 to the previous one."""
    return jax.tree.map(lambda x: jnp.roll(x, by, axis=0), x)


def _replaced(x: jax.Array, stage: int, by: jax.Array) -> jax.Array:
    """Replaces the values of one stage without communication between stages."""
    index = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0],) + (1,) * (x.ndim - 1), 0)
    return jnp.where(index == stage, by, x)
