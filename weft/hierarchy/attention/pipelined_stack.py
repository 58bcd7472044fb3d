"""Pipelined stack of transformer layers; each stage is a stack of some of them."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from weft import config, errors, struct
from weft.functional.arrays import without_none
from weft.hierarchy.attention import bias, kv_cache, stack
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.module import Module
from weft.hierarchy.pipeline import Pipeline
from weft.typing import NestedTensor, Tensor

# Optional outputs of stages, with axes of layers and rows.
_PROBS = ("self_attention_probs", "cross_attention_probs")


class TransformerPipeline(Pipeline):
    """Pipeline of a pipelined stack."""

    def forward(
        self, data: Tensor, *, return_aux: Collection[str] | None = None, **layer_kwargs: Any
    ) -> stack.Output:
        """Applies all stages to a whole sequence; keyword arguments go to each stage."""
        batch = data.shape[0]
        for name in layer_kwargs:
            if name.endswith("_logit_biases") and layer_kwargs[name] is not None:
                layer_kwargs[name] = bias.as_attention_bias(layer_kwargs[name])  # it has four axes
        leaves, tree = jax.tree.flatten(layer_kwargs)
        # Arrays with a row per example move with the rows; others are shared.
        with_rows = [jnp.shape(x)[:1] == (batch,) for x in leaves]

        def stage(carry: Any, _: None) -> tuple[Any, stack.Output]:
            data, rows = carry
            moving = iter(rows)
            mixed = [
                next(moving) if is_row else x for x, is_row in zip(leaves, with_rows, strict=True)
            ]
            output = self.layer(data, return_aux=return_aux, **tree.unflatten(mixed))
            # Rows first, so that microbatches can be joined.
            probs = _map_probs(lambda x: jnp.moveaxis(x, 0, 1), output)
            # Values shared by all rows, such as positions, are returned once per row.
            kv_state = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (data.shape[0], *x.shape[1:])),
                output.self_attention_kv_state,
            )
            rest = output._replace(data=None, self_attention_kv_state=kv_state, **probs)
            return (output.data, rows), rest

        rows = [x for x, is_row in zip(leaves, with_rows, strict=True) if is_row]
        (data, _), rest = self._run(stage, (data, rows))
        probs = _map_probs(lambda x: jnp.moveaxis(x, 1, 2), rest)
        return _merge_stages(data, rest._replace(**probs))

    def extend_step(
        self,
        cached_states: dict[str, Any],
        data: Tensor,
        *,
        page_pool: kv_cache.KVPages | None = None,
        **kwargs: object,
    ) -> tuple[NestedTensor, stack.Output]:
        """Applies the stages in sequence; `page_pool` has leading axes of stages and of layers."""

        def stage(data: Tensor, own: tuple[Any, kv_cache.KVPages | None]) -> tuple[Tensor, Any]:
            state, page_pool = own
            given = without_none(page_pool=page_pool)
            state, output = self.layer.extend_step(state, data, **given, **kwargs)
            return output.data, (state, output._replace(data=None))

        xs = (cached_states["layer"], page_pool)
        data, (states, rest) = self._run_sequentially(stage, data, xs=xs)
        return struct.VDict(layer=states), _merge_stages(data, rest)


def _map_probs(fn: Callable[[Tensor], Tensor], output: stack.Output) -> dict[str, Any]:
    """Returns the probabilities in the output, each mapped by `fn`; None for those it lacks."""
    return {name: jax.tree.map(fn, getattr(output, name)) for name in _PROBS}


def _merge_stages(data: Tensor, rest: stack.Output) -> stack.Output:
    return rest._replace(
        data=data,
        self_attention_kv_state=jax.tree.map(lambda x: x[-1], rest.self_attention_kv_state),
        **_map_probs(lambda x: x.reshape(-1, *x.shape[2:]), rest),
    )


class PipelinedTransformerLayer(stack.BaseStackedTransformerLayer):
    """Stack whose stages work on different microbatches at the same time.

    Parameters have a leading axis of stages with the name "pipeline". In decoding, stages run in
    sequence.

    >>> from weft.hierarchy.attention.transformer import TransformerLayer
    >>> layer = TransformerLayer.default_config()
    >>> layer.self_attention.attention.num_heads, layer.feed_forward.hidden_dim = 2, 16
    >>> cfg = PipelinedTransformerLayer.default_config().set(
    ...     name="stack", input_dim=8, layer=layer, num_layers=4, num_stages=2, num_microbatches=4
    ... )
    >>> specs = cfg.instantiate(parent=None).create_parameter_specs_recursively()
    >>> weight = specs["pipeline"]["layer"]["layer1"]["feed_forward"]["linear1"]["weight"]
    >>> weight.shape, tuple(weight.mesh_axes)
    ((2, 8, 16), ('pipeline', None, 'model'))
    """

    class Config(stack.BaseStackedTransformerLayer.Config):
        """Configures a PipelinedTransformerLayer.

        Attributes:
          num_stages: number of stages, which divides `num_layers`.
          num_microbatches: number of parts of a batch; see `Pipeline`.
          stage: stack of one stage's layers, each with the config `layer`.
        """

        num_stages: config.Required[int] = config.REQUIRED
        num_microbatches: config.Required[int] = config.REQUIRED
        stage: BaseLayer.Config = stack.StackedTransformerLayer.default_config()
        pipeline: TransformerPipeline.Config = TransformerPipeline.default_config()

    _decoding_child = "pipeline"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.num_stages < 1 or cfg.num_layers % cfg.num_stages:
            raise errors.LayerConfigError(
                f"{self.path()}: num_layers={cfg.num_layers} is not a multiple of num_stages="
                f"{cfg.num_stages}; set num_stages to a divisor."
            )
        for name in ("peak_stochastic_depth_rate", "scan_kwargs"):
            if getattr(cfg, name):
                raise errors.LayerConfigError(
                    f"{self.path()}: {name}={getattr(cfg, name)} makes layers differ, but the "
                    "stages of a pipeline must be equal; use StackedTransformerLayer."
                )
        carry = tuple(cfg.carry or ("data",))
        if carry != ("data",):
            raise errors.LayerConfigError(
                f"{self.path()}: carry={carry}, but stages of a pipeline pass on only "
                "'data'; use RepeatedTransformerLayer."
            )
        stage: Any = cfg.stage
        num_layers, layer = cfg.num_layers // cfg.num_stages, self._with_input_dim(cfg.layer)
        stage = stage.set(input_dim=cfg.input_dim, num_layers=num_layers, layer=layer)
        pipeline = cfg.pipeline.set(layer=stage, num_layers=cfg.num_stages)
        self._add_child("pipeline", pipeline.set(num_microbatches=cfg.num_microbatches))
