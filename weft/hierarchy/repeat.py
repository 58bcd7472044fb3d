"""Repeat: one layer in a loop, with separate parameters for each iteration.

    for i in range(num_layers):
        carry, ys[i] = fn(carry, xs[i])    # self.layer(...) in fn has the i-th parameters and key

The loop is a `jax.lax.scan`, so that it traces and compiles as fast as one layer. The state of the
child "layer" holds the parameters of all iterations along a leading axis.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from weft import config, struct
from weft.functional.arrays import on_one_cpu
from weft.hierarchy import transforms
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.context import (
    InvocationContext,
    OutputCollection,
    new_output_collection,
)
from weft.hierarchy.module import Module
from weft.typing import NestedTensor

_MAX_UNROLLED = 4


def drop_by_regex(rules: Sequence[str]) -> Callable[[str], bool]:
    """Returns a predicate for paths that one of the rules matches in full."""
    return lambda path: any(re.fullmatch(rule, path) for rule in rules)


class Repeat(BaseLayer):
    """Layer that runs a child "layer" `num_layers` times.

    A subclass defines `forward`, which calls `_run`.

    >>> from weft.hierarchy.base_layer import ParameterSpec
    >>> from weft.hierarchy.module import functional
    >>> class Scale(BaseLayer):
    ...     def _create_layer_parameter_specs(self):
    ...         return {"scale": ParameterSpec(())}
    ...     def forward(self, x):
    ...         return x * self.parameters["scale"]
    >>> class RepeatedScale(Repeat):
    ...     def forward(self, x):
    ...         return self._run(lambda x, _: (self.layer(x), None), x).carry
    >>> cfg = RepeatedScale.default_config().set(num_layers=3, layer=Scale.default_config())
    >>> repeated = cfg.set(name="repeated").instantiate(parent=None)
    >>> state = {"layer": {"scale": jax.numpy.array([2.0, 3.0, 5.0])}}
    >>> y, _ = functional(repeated, prng_key=None, state=state, inputs=(1.0,), is_training=False)
    >>> float(y)
    30.0
    """

    class Config(BaseLayer.Config):
        """Configures a Repeat."""

        layer: config.Required[config.InstantiableConfig] = config.REQUIRED
        """The repeated layer. Its `remat_spec` applies to each iteration."""
        num_layers: config.Required[int] = config.REQUIRED
        unroll: bool | int | None = None
        """Number of iterations per step of the loop; True for all. None for one, or on one CPU for
        all of up to 4 without `remat_spec`: a loop copies what its backward pass needs, which took
        a fifth of a step, and so few layers compile as fast."""
        drop_output: config.InstantiableConfig[Callable[[str], bool]] = (
            config.config_for_function(drop_by_regex).set(
                rules=["module_outputs.*"]
            )
        )
        """Returns a predicate for paths of outputs to drop, such as
        "module_outputs/attention/probs". Default: all module outputs, since stacking them costs
        memory."""

    class Output(NamedTuple):
        """Final carry, and other outputs of the iterations along a leading axis."""

        carry: Any
        ys: Any

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child("layer", cfg.layer)
        self._drop_output = config.maybe_instantiate(cfg.drop_output)

    def _stacked_sizes(self, name: str) -> tuple[int, ...]:
        if name == "layer":
            return (self.config.num_layers,)
        return super()._stacked_sizes(name)

    def init_states(self, **kwargs: object) -> NestedTensor:
        """Returns the stacked decoding states of all iterations."""
        n = self.config.num_layers
        state = self.layer.init_states(**kwargs)
        return struct.VDict(
            layer=jax.tree.map(
                lambda x: jnp.broadcast_to(x, (n, *x.shape)), state
            )
        )

    def _scan_kwargs(self) -> dict[str, Any]:
        cfg, spec, remat_kwargs = (
            self.config,
            self.layer.config.remat_spec,
            None,
        )
        unroll = cfg.unroll
        if unroll is None:
            unroll = (
                cfg.num_layers <= _MAX_UNROLLED
                and spec is None
                and on_one_cpu()
            )
        unroll = unroll or 1
        if spec is not None and self.is_training:
            # A loop separates its forward and backward pass; only without one could the compiler
            # merge recomputed values.
            without_loop = unroll is True or unroll >= cfg.num_layers
            remat_kwargs = {
                "prevent_cse": spec.prevent_cse and without_loop,
                "policy": config.maybe_instantiate(spec.policy),
            }
        return {
            "unroll": unroll,
            "remat_kwargs": remat_kwargs,
            "drop_output": self._drop_output,
        }

    def _run(
        self,
        fn: Callable[[Any, Any], tuple[Any, Any]],
        carry: Any = None,
        *,
        xs: Any = None,
    ) -> Output:
        """Runs the loop.

        Args:
          fn: takes the carry and a slice of `xs`; returns the next carry and values to stack. It
            calls `self.layer`, which has the parameters, key and outputs of the iteration.
          xs: a pytree of arrays with a leading axis of `num_layers`.

        Returns:
          The final carry and the stacked values. Summaries of iteration i are added under
          "layer{i}"; state updates are stacked under "layer".
        """
        context = self.get_invocation_context()
        layer_context = context.add_child("layer", prng_key=context.prng_key)
        inner = layer_context.fork_with_outputs(
            state=self._state_by_iteration(layer_context.state),
            output_collection=new_output_collection(),
        )
        result = transforms.scan(
            inner,
            fn,
            carry,
            xs,
            state_axis=0,
            length=self.config.num_layers,
            **self._scan_kwargs(),
        )
        self._add_outputs(layer_context, inner.output_collection)
        return Repeat.Output(*result)

    def _state_by_iteration(self, state: NestedTensor) -> NestedTensor:
        """Returns the state of "layer" with one leading axis, of iterations."""
        return state

    def _add_outputs(
        self, layer_context: InvocationContext, repeated: OutputCollection
    ) -> None:
        outputs = self.get_invocation_context().output_collection
        target = outputs._replace(
            state_updates=layer_context.output_collection.state_updates
        )
        transforms.propagate_repeated_output_collections(
            repeated, child_name_prefix="layer", target_output_collection=target
        )
