"""Stacks of transformer layers, and which of their intermediate values are recomputed.

`StackedTransformerLayer` has a child for each layer, and layers may differ.
`RepeatedTransformerLayer` has one child with stacked parameters, which traces and compiles as fast
as one layer. `PipelinedTransformerLayer` distributes such stacks over the stages of a pipeline.

Layers name their intermediate values `<layer class>.<name>`, such as "MultiheadAttention.q_proj". A
rematerialization policy saves values whose names match a regular expression, offloads others to
host memory, and recomputes the rest in the backward pass.
"""

import enum
import operator
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from weft import config, errors, functional, struct
from weft.functional.arrays import without_none
from weft.hierarchy.attention import bias, kv_cache
from weft.hierarchy.attention.multihead_attention import ForwardMode
from weft.hierarchy.attention.transformer import (
    BaseTransformerLayer,
    TransformerLayer,
)
from weft.hierarchy.base_layer import BaseLayer, RematSpec
from weft.hierarchy.module import Module
from weft.hierarchy.pipeline import Pipeline, num_repeats_of
from weft.hierarchy.repeat import Repeat
from weft.typing import DType, NestedTensor, PyTree, Tensor

Output = BaseTransformerLayer.Output


class UpdateDataFn(Protocol):
    """Function that computes a layer's input."""

    def __call__(self, data: Tensor, all_layer_outputs: list[Output]) -> Tensor:
        """Returns the next layer's input; `data`, the previous layer's output, is the default."""
        ...


def update_data_with_skip_connection(
    skip_connections: dict[int, int],
) -> UpdateDataFn:
    """Returns a function that adds outputs of earlier layers to inputs of later ones.

    `skip_connections` maps each later layer to the earlier one, both counted from 0.
    """

    def update_data(data: Tensor, all_layer_outputs: list[Output]) -> Tensor:
        earlier = skip_connections.get(len(all_layer_outputs))
        return (
            data if earlier is None else data + all_layer_outputs[earlier].data
        )

    return update_data


class BaseStackedTransformerLayer(BaseTransformerLayer):
    """Base of stacks of transformer layers."""

    class Config(BaseTransformerLayer.Config):
        """Configures a BaseStackedTransformerLayer."""

        num_layers: config.Required[int] = config.REQUIRED
        layer: BaseTransformerLayer.Config | None = (
            TransformerLayer.default_config()
        )
        """Config of each layer; None for one that is set later, such as by a pipeline."""
        peak_stochastic_depth_rate: float | None = None
        """Rate of the last layer, to which the rates grow linearly; None keeps the configured
        rates."""
        carry: Sequence[str] | None = None
        """Arguments that a layer gets from the previous layer's output; None for "data"."""
        scan_kwargs: Sequence[str] | None = None
        """Arguments with a leading axis of layers, in addition to `page_pool`."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.layer is None:
            raise errors.LayerConfigError(
                f"{self.path()}: layer is None; set the config of its layers, such as "
                "TransformerLayer.default_config()."
            )
        if cfg.carry is not None and "data" not in cfg.carry:
            raise errors.LayerConfigError(
                f"{self.path()}: carry={tuple(cfg.carry)} lacks 'data', which each layer "
                "passes to the next."
            )

    def _with_input_dim(self, layer: Any) -> Any:
        if layer.input_dim not in (config.REQUIRED, self.config.input_dim):
            raise errors.LayerConfigError(
                f"{self.path()}: layer.input_dim={layer.input_dim} differs from input_dim="
                f"{self.config.input_dim} of the stack; set only that of the stack."
            )
        return layer.set(input_dim=self.config.input_dim)


def _aux_to_carry(
    carry: Sequence[str] | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a layer that also returns what the next layer gets."""
    return_aux: set[str] = set(kwargs.get("return_aux") or ())
    return_aux.update(carry or ())
    return {**kwargs, "return_aux": return_aux - {"data"}}


def _pop_scanned(
    scan_kwargs: Sequence[str] | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Removes and returns the arguments with a leading axis of layers."""
    names = set(scan_kwargs or ())
    if "page_pool" in kwargs:  # each layer has its own pages
        names.add("page_pool")
    return {name: kwargs.pop(name, None) for name in names}


def _select_outputs(
    output: Output, return_aux: Collection[str] | None
) -> Output:
    """Returns the output without optional values that were not asked for."""
    omitted_names = set(Output._fields) - {"data", *(return_aux or ())}
    return output._replace(**dict.fromkeys(omitted_names))


class StackedTransformerLayer(BaseStackedTransformerLayer):
    """Stack with one child per layer: "layer0", "layer1", and so on."""

    class Config(BaseStackedTransformerLayer.Config):
        """Configures a StackedTransformerLayer; `layer` may be a list with one config per layer."""

        layer: (
            BaseTransformerLayer.Config
            | Sequence[BaseTransformerLayer.Config]
            | None
        ) = TransformerLayer.default_config()
        data_merger: config.InstantiableConfig[UpdateDataFn] | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        layers: Any = cfg.layer
        if not isinstance(layers, list | tuple):
            layers = [layers.clone() for _ in range(cfg.num_layers)]
        if len(layers) != cfg.num_layers:
            raise errors.LayerConfigError(
                f"{self.path()}: layer has {len(layers)} configs, but num_layers={cfg.num_layers}; "
                "give one config per layer, or one for all."
            )
        self._update_data = config.maybe_instantiate(cfg.data_merger)
        for i, layer in enumerate(layers):
            layer = self._with_input_dim(layer)
            if cfg.peak_stochastic_depth_rate:
                self._set_stochastic_depth_rate(layer, i)
            self._add_child(f"layer{i}", layer)

    def _set_stochastic_depth_rate(self, layer: Any, index: int) -> None:
        cfg = self.config
        rate = functional.get_stochastic_depth_linear_rate(
            cfg.peak_stochastic_depth_rate,
            stage_order=index + 1,
            num_stages=cfg.num_layers,
        )
        for name in ("self_attention", "cross_attention", "feed_forward"):
            branch = getattr(layer, name, None)
            if branch is not None:
                branch.stochastic_depth.rate = rate

    def init_states(
        self, *, batch_size: int, max_len: int, dtype: DType
    ) -> NestedTensor:
        states: dict[str, NestedTensor] = {}
        for name, layer in self._layers():
            states[name] = layer.init_states(
                batch_size=batch_size, max_len=max_len, dtype=dtype
            )
        return states

    def _layers(self) -> list[tuple[str, Any]]:
        names = [f"layer{i}" for i in range(self.config.num_layers)]
        return [(name, getattr(self, name)) for name in names]

    def _forward_for_mode(
        self,
        mode: ForwardMode,
        cached_states: dict[str, Any],
        data: Tensor,
        **layer_kwargs: Any,
    ) -> tuple[NestedTensor, Output]:
        cfg = self.config
        return_aux = layer_kwargs.get("return_aux")
        scanned_kwargs = _pop_scanned(cfg.scan_kwargs, layer_kwargs)
        carried_names = set(cfg.carry or ()) - {"data"}
        layer_kwargs = _aux_to_carry(cfg.carry, layer_kwargs)
        outputs: list[Output] = []
        for i, (name, _) in enumerate(self._layers()):
            if self._update_data is not None:
                data = self._update_data(data, outputs)
            if outputs:
                for carried_name in carried_names:
                    layer_kwargs[carried_name] = getattr(
                        outputs[-1], carried_name
                    )
            self._update_layer_kwargs(layer_kwargs, all_layer_outputs=outputs)
            scanned_slices = jax.tree.map(
                operator.itemgetter(i), scanned_kwargs
            )
            cached_states, output = self._call_child(
                name,
                mode,
                cached_states,
                data,
                **layer_kwargs,
                **scanned_slices,
            )
            outputs.append(output)
            data = output.data
        selected_outputs = [
            _select_outputs(output, return_aux) for output in outputs
        ]
        return cached_states, self._aggregate_layer_outputs(selected_outputs)

    def _update_layer_kwargs(
        self, layer_kwargs: dict[str, Any], *, all_layer_outputs: list[Output]
    ) -> None:
        """Changes the arguments of the next layer in place; subclasses may override this."""

    def _aggregate_layer_outputs(
        self, layer_outputs: Sequence[Output]
    ) -> Output:
        def stack(name: str) -> Tensor | None:
            values = [getattr(output, name) for output in layer_outputs]
            if any(value is None for value in values):
                return None
            return jnp.stack(values)

        return layer_outputs[-1]._replace(
            self_attention_probs=stack("self_attention_probs"),
            cross_attention_probs=stack("cross_attention_probs"),
        )


class TransformerRepeat(Repeat):
    """Loop of a repeated stack."""

    class Config(Repeat.Config):
        """Configures a TransformerRepeat; see the stack for both fields."""

        carry: Sequence[str] | None = None
        scan_kwargs: Sequence[str] | None = None

    def forward(self, data: Tensor, **layer_kwargs: PyTree) -> Output:
        """Applies all layers to a whole sequence."""

        def apply(_: None, **kwargs: PyTree) -> tuple[None, Output]:
            return None, self.layer(**kwargs)

        _, output = self._loop(apply, None, data, **layer_kwargs)
        return output

    def extend_step(
        self,
        cached_states: dict[str, Any],
        data: Tensor,
        **layer_kwargs: PyTree,
    ) -> tuple[NestedTensor, Output]:
        """Applies all layers to the next positions."""

        def apply(
            state: NestedTensor, **kwargs: PyTree
        ) -> tuple[NestedTensor, Output]:
            return self.layer.extend_step(state, **kwargs)

        states, output = self._loop(
            apply, cached_states["layer"], data, **layer_kwargs
        )
        return struct.VDict(layer=states), output

    def _loop(
        self,
        apply: Callable[..., tuple[PyTree, Output]],
        states: PyTree,
        data: Tensor,
        **kwargs: PyTree,
    ) -> tuple[PyTree, Output]:
        cfg = self.config
        return_aux = kwargs.get("return_aux")
        # Arguments are carried from layer to layer, scanned along the layers, or the same for all.
        kwargs = _aux_to_carry(cfg.carry, {"data": data, **kwargs})
        carried_kwargs = {
            name: kwargs.pop(name) for name in cfg.carry or ("data",)
        }
        scanned_kwargs = _pop_scanned(cfg.scan_kwargs, kwargs)

        def step(
            carried_kwargs: dict[str, PyTree],
            x: tuple[PyTree, dict[str, PyTree]],
        ) -> tuple[dict[str, PyTree], tuple[PyTree, Output]]:
            state, scanned_slices = x
            state, output = apply(
                state, **carried_kwargs, **scanned_slices, **kwargs
            )
            next_kwargs = {
                name: getattr(output, name) for name in carried_kwargs
            }
            stacked_output = _select_outputs(output, return_aux)._replace(
                data=None
            )
            return next_kwargs, (state, stacked_output)

        carried_kwargs, (states, output) = self._run(
            step, carried_kwargs, xs=(states, scanned_kwargs)
        )
        output = output._replace(
            data=carried_kwargs["data"],
            self_attention_kv_state=_last(output.self_attention_kv_state),
        )
        return states, output


def _last(stacked: PyTree) -> PyTree:
    """Returns the entries of the last layer."""
    return jax.tree.map(operator.itemgetter(-1), stacked)


class RepeatedTransformerLayer(BaseStackedTransformerLayer):
    """Stack with one child in a loop, whose parameters have a leading axis of layers."""

    class Config(BaseStackedTransformerLayer.Config):
        repeat: TransformerRepeat.Config = TransformerRepeat.default_config()

    _decoding_child = "repeat"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.peak_stochastic_depth_rate:
            raise errors.LayerConfigError(
                f"{self.path()}: peak_stochastic_depth_rate={cfg.peak_stochastic_depth_rate} sets "
                "a rate per layer, but repeated layers share one config; use "
                "StackedTransformerLayer, or set the rate of layer's stochastic_depth."
            )
        repeat = cfg.repeat.set(
            layer=self._with_input_dim(cfg.layer), num_layers=cfg.num_layers
        )
        self._add_child(
            "repeat", repeat.set(carry=cfg.carry, scan_kwargs=cfg.scan_kwargs)
        )


# Optional outputs of stages, with axes of layers and rows.
_PROBS = ("self_attention_probs", "cross_attention_probs")


class TransformerPipeline(Pipeline):
    """Pipeline of a pipelined stack."""

    def forward(
        self,
        data: Tensor,
        *,
        return_aux: Collection[str] | None = None,
        **layer_kwargs: Any,
    ) -> Output:
        """Applies all stages to a whole sequence; keyword arguments go to each stage."""
        batch = data.shape[0]
        for name in layer_kwargs:
            if (
                name.endswith("_logit_biases")
                and layer_kwargs[name] is not None
            ):
                layer_kwargs[name] = bias.as_attention_bias(
                    layer_kwargs[name]
                )  # it has four axes
        leaves, structure = jax.tree.flatten(layer_kwargs)
        # Arrays with a row per example move with the rows; others are shared by all stages.
        arrays_by_position: dict[int, Tensor] = {}
        for position, leaf in enumerate(leaves):
            if jnp.shape(leaf)[:1] == (batch,):
                arrays_by_position[position] = leaf

        def stage(
            carry: tuple[Tensor, dict[int, Tensor]], _: None
        ) -> tuple[tuple[Tensor, dict[int, Tensor]], Output]:
            data, rows_by_position = carry
            stage_leaves = list(leaves)
            for position, rows in rows_by_position.items():
                stage_leaves[position] = rows
            stage_kwargs = structure.unflatten(stage_leaves)
            output = self.layer(data, return_aux=return_aux, **stage_kwargs)
            # Rows first, so that microbatches can be joined.
            probs = _map_probs(lambda x: jnp.moveaxis(x, 0, 1), output)
            # Values shared by all rows, such as positions, are returned once per row.
            kv_state = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (data.shape[0], *x.shape[1:])),
                output.self_attention_kv_state,
            )
            stacked_output = output._replace(
                data=None, self_attention_kv_state=kv_state, **probs
            )
            return (output.data, rows_by_position), stacked_output

        (data, _), output = self._run(stage, (data, arrays_by_position))
        probs = _map_probs(lambda x: jnp.moveaxis(x, 1, 2), output)
        return _merge_stages(data, output._replace(**probs))

    def extend_step(
        self,
        cached_states: dict[str, Any],
        data: Tensor,
        *,
        page_pool: kv_cache.KVPages | None = None,
        **kwargs: PyTree,
    ) -> tuple[NestedTensor, Output]:
        """Applies the stages in sequence; `page_pool` has leading axes of stages and of layers."""

        def stage(
            data: Tensor, x: tuple[PyTree, kv_cache.KVPages | None]
        ) -> tuple[Tensor, tuple[PyTree, Output]]:
            state, page_pool = x
            pool_kwargs = without_none(page_pool=page_pool)
            state, output = self.layer.extend_step(
                state, data, **pool_kwargs, **kwargs
            )
            return output.data, (state, output._replace(data=None))

        xs = (cached_states["layer"], page_pool)
        data, (states, output) = self._run_sequentially(stage, data, xs=xs)
        return struct.VDict(layer=states), _merge_stages(data, output)


def _map_probs(
    fn: Callable[[Tensor], Tensor], output: Output
) -> dict[str, PyTree]:
    """Returns the probabilities in the output, each mapped by `fn`; None for those it lacks."""
    return {name: jax.tree.map(fn, getattr(output, name)) for name in _PROBS}


def _merge_stages(data: Tensor, output: Output) -> Output:
    """Returns the output of the stack, from that of the stages with a leading axis of stages."""
    return output._replace(
        data=data,
        self_attention_kv_state=_last(output.self_attention_kv_state),
        **_map_probs(lambda x: x.reshape(-1, *x.shape[2:]), output),
    )


class PipelinedTransformerLayer(BaseStackedTransformerLayer):
    """Stack whose stages work on different microbatches at the same time.

    Parameters have a leading axis of stages with the name "pipeline". In decoding, stages run in
    sequence.

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

    class Config(BaseStackedTransformerLayer.Config):
        """Configures a PipelinedTransformerLayer."""

        num_stages: config.Required[int] = config.REQUIRED
        """Number of stages, which divides `num_layers`."""
        num_microbatches: config.Required[int] = config.REQUIRED
        """Number of parts of a batch; see `Pipeline`."""
        stage: BaseLayer.Config = StackedTransformerLayer.default_config()
        """Stack of the layers of a stage, or of one of its parts, each with the config `layer`."""
        pipeline: TransformerPipeline.Config = (
            TransformerPipeline.default_config()
        )

    _decoding_child = "pipeline"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.num_stages < 1 or cfg.num_layers % cfg.num_stages:
            raise errors.LayerConfigError(
                f"{self.path()}: num_layers={cfg.num_layers} is not a multiple of num_stages="
                f"{cfg.num_stages}; set num_stages to a divisor."
            )
        num_repeats = num_repeats_of(cfg.pipeline.schedule)
        num_parts = cfg.num_stages * num_repeats
        if num_repeats < 1 or cfg.num_layers % num_parts:
            raise errors.LayerConfigError(
                f"{self.path()}: num_layers={cfg.num_layers} do not divide into {num_parts} equal "
                f"parts, num_repeats={num_repeats} for each of num_stages={cfg.num_stages}; set "
                "num_repeats of pipeline.schedule to another number, or num_layers to a multiple "
                f"of {cfg.num_stages}."
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
        stage.set(
            input_dim=cfg.input_dim,
            num_layers=cfg.num_layers // num_parts,
            layer=self._with_input_dim(cfg.layer),
        )
        pipeline = cfg.pipeline.set(layer=stage, num_layers=num_parts)
        self._add_child(
            "pipeline", pipeline.set(num_microbatches=cfg.num_microbatches)
        )


class RematRegexSavePatterns(enum.Enum):
    """Useful patterns of names to save, with or without the class of a layer in front."""

    QKV_PROJ = r"(.*\.)?[qkv]_proj"
    O_PROJ = r"(.*\.)?o_proj"
    CONTEXT = r"(.*\.)?context"
    LINEAR1_X = r"(.*\.)?linear1_[01]"
    LINEAR2_X = r"(.*\.)?linear2_[01]"
    GATE_WEIGHTS = r"(.*\.)?gate_weights"
    GATE_ASSIGNMENT = r"(.*\.)?gate_assignment"
    NATIVE_ATTENTION = r"(.*\.)?([qkvo]_proj|context)"
    """Intermediate values of attention, except logits and probabilities."""
    FLASH_CONTEXT = CONTEXT
    FLASH_ATTENTION = NATIVE_ATTENTION
    FEED_FORWARD = r"(.*\.)?linear[12]_[01]"
    """The linear maps of feed-forward layers."""
    MOE_GATING = r"(.*\.)?gate_(weights|assignment)"
    """The choice of experts."""
    INPUT = r"(.*\.)?input"
    """The inputs of transformer layers."""


def save_and_offload_these_names_regex(
    names_which_can_be_saved: str | None = None,
    names_which_can_be_offloaded: str | None = None,
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> Callable[..., Any]:
    """Returns a policy for `jax.checkpoint` that goes by the names of values.

    Args:
      names_which_can_be_saved: a regular expression that must match the whole name; None for none.
      names_which_can_be_offloaded: the same for values to offload if they are not saved.
    """

    def policy(prim: Any, *args: object, **params: Any) -> Any:
        name = params.get("name") if prim.name == "name" else None
        if name is None:
            return False
        if names_which_can_be_saved and re.fullmatch(
            names_which_can_be_saved, name
        ):
            return True
        if not re.fullmatch(names_which_can_be_offloaded or "", name):
            return False
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[name],
            offload_src=offload_src,
            offload_dst=offload_dst,
        )(prim, *args, **params)

    return policy


def build_remat_spec(
    stack_cfg: BaseStackedTransformerLayer.Config,
    *,
    save_pattern: str | None = RematRegexSavePatterns.NATIVE_ATTENTION.value,
    offload_pattern: str | None = None,
    offload_dst: str = "pinned_host",
) -> RematSpec:
    """Returns the `remat_spec` of a stack's layer; see `save_and_offload_these_names_regex`."""
    return RematSpec(
        # In a loop, the compiler cannot merge recomputed values with the original ones.
        prevent_cse=issubclass(stack_cfg.klass, StackedTransformerLayer),
        policy=config.config_for_function(
            save_and_offload_these_names_regex
        ).set(
            names_which_can_be_saved=save_pattern,
            names_which_can_be_offloaded=offload_pattern,
            offload_dst=offload_dst,
        ),
    )
