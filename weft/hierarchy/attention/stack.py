"""Stacks of transformer layers, and which of their intermediate values are recomputed.

`StackedTransformerLayer` has a child for each layer, and layers may differ.
`RepeatedTransformerLayer` has one child with stacked parameters, which traces and compiles as fast
as one layer.

Layers name their intermediate values `<layer class>.<name>`, such as "MultiheadAttention.q_proj". A
rematerialization policy saves values whose names match a regular expression, offloads others to
host memory, and recomputes the rest in the backward pass.
"""

import enum
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from weft import config, errors, functional, struct
from weft.hierarchy.attention.multihead_attention import ForwardMode
from weft.hierarchy.attention.transformer import BaseTransformerLayer, TransformerLayer
from weft.hierarchy.base_layer import RematSpec
from weft.hierarchy.module import Module
from weft.hierarchy.repeat import Repeat
from weft.typing import DType, NestedTensor, Tensor

Output = BaseTransformerLayer.Output


class UpdateDataFn(Protocol):
    """Function that computes a layer's input."""

    def __call__(self, data: Tensor, all_layer_outputs: list[Output]) -> Tensor:
        """Returns the next layer's input; `data`, the previous layer's output, is the default."""
        ...


def update_data_with_skip_connection(skip_connections: dict[int, int]) -> UpdateDataFn:
    """Returns a function that adds outputs of earlier layers to inputs of later ones.

    `skip_connections` maps each later layer to the earlier one, both counted from 0.
    """

    def update_data(data: Tensor, all_layer_outputs: list[Output]) -> Tensor:
        earlier = skip_connections.get(len(all_layer_outputs))
        return data if earlier is None else data + all_layer_outputs[earlier].data

    return update_data


class BaseStackedTransformerLayer(BaseTransformerLayer):
    """Base of stacks of transformer layers."""

    class Config(BaseTransformerLayer.Config):
        """Configures a BaseStackedTransformerLayer.

        Attributes:
          layer: config of each layer; None for one that is set later, such as by a pipeline.
          peak_stochastic_depth_rate: rate of the last layer, to which the rates grow linearly; None
            keeps the configured rates.
          carry: arguments that a layer gets from the previous layer's output; None for "data".
          scan_kwargs: arguments with a leading axis of layers, in addition to `page_pool`.
        """

        num_layers: config.Required[int] = config.REQUIRED
        layer: BaseTransformerLayer.Config | None = TransformerLayer.default_config()
        peak_stochastic_depth_rate: float | None = None
        carry: Sequence[str] | None = None
        scan_kwargs: Sequence[str] | None = None

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


def _aux_to_carry(carry: Sequence[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    aux = {name for name in carry or () if name != "data"}
    return {**kwargs, "return_aux": {*(kwargs.get("return_aux") or ()), *aux}}


def _pop_scanned(scan_kwargs: Sequence[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Removes and returns the arguments with a leading axis of layers."""
    # Each layer has its own pages.
    names = {*(scan_kwargs or ()), *({"page_pool"} & kwargs.keys())}
    return {name: kwargs.pop(name, None) for name in names}


def _select_outputs(output: Output, return_aux: Collection[str] | None) -> Output:
    fields = {"data", *(return_aux or ())}
    return output._replace(**{name: None for name in Output._fields if name not in fields})


class StackedTransformerLayer(BaseStackedTransformerLayer):
    """Stack with one child per layer: "layer0", "layer1", and so on."""

    class Config(BaseStackedTransformerLayer.Config):
        """Configures a StackedTransformerLayer; `layer` may be a list with one config per layer."""

        layer: BaseTransformerLayer.Config | Sequence[BaseTransformerLayer.Config] | None = (
            TransformerLayer.default_config()
        )
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
            cfg.peak_stochastic_depth_rate, stage_order=index + 1, num_stages=cfg.num_layers
        )
        for name in ("self_attention", "cross_attention", "feed_forward"):
            if getattr(layer, name, None) is not None:
                getattr(layer, name).stochastic_depth.rate = rate

    def init_states(self, *, batch_size: int, max_len: int, dtype: DType) -> NestedTensor:
        return {
            name: layer.init_states(batch_size=batch_size, max_len=max_len, dtype=dtype)
            for name, layer in self._layers()
        }

    def _layers(self) -> list[tuple[str, Any]]:
        names = [f"layer{i}" for i in range(self.config.num_layers)]
        return [(name, getattr(self, name)) for name in names]

    def _forward_for_mode(
        self, mode: ForwardMode, cached_states: dict[str, Any], data: Tensor, **layer_kwargs: Any
    ) -> tuple[NestedTensor, Output]:
        cfg = self.config
        return_aux = layer_kwargs.get("return_aux")
        scanned = _pop_scanned(cfg.scan_kwargs, layer_kwargs)
        layer_kwargs = _aux_to_carry(cfg.carry, layer_kwargs)
        outputs: list[Output] = []
        for i, (name, _) in enumerate(self._layers()):
            if self._update_data is not None:
                data = self._update_data(data, outputs)
            for key in set(cfg.carry or ()) - {"data"} if outputs else ():
                layer_kwargs[key] = getattr(outputs[-1], key)
            own = jax.tree.map(lambda x, i=i: x[i], scanned)
            self._update_layer_kwargs(layer_kwargs, all_layer_outputs=outputs)
            cached_states, output = self._call_child(
                name, mode, cached_states, data, **layer_kwargs, **own
            )
            outputs.append(output)
            data = output.data
        return cached_states, self._aggregate_layer_outputs(
            [_select_outputs(o, return_aux) for o in outputs]
        )

    def _update_layer_kwargs(
        self, layer_kwargs: dict[str, Any], *, all_layer_outputs: list[Output]
    ) -> None:
        """Changes the arguments of the next layer in place; subclasses may override this."""

    def _aggregate_layer_outputs(self, layer_outputs: Sequence[Output]) -> Output:
        def stacked(name: str) -> Tensor | None:
            values = [getattr(output, name) for output in layer_outputs]
            return None if any(v is None for v in values) else jnp.stack(values)

        return layer_outputs[-1]._replace(
            self_attention_probs=stacked("self_attention_probs"),
            cross_attention_probs=stacked("cross_attention_probs"),
        )


class TransformerRepeat(Repeat):
    """Loop of a repeated stack."""

    class Config(Repeat.Config):
        """Configures a TransformerRepeat; see the stack for both fields."""

        carry: Sequence[str] | None = None
        scan_kwargs: Sequence[str] | None = None

    def forward(self, data: Tensor, **layer_kwargs: object) -> Output:
        """Applies all layers to a whole sequence."""

        def apply(_: None, **kwargs: object) -> tuple[None, Output]:
            return None, self.layer(**kwargs)

        return self._loop(apply, None, data, **layer_kwargs)[1]

    def extend_step(
        self, cached_states: dict[str, Any], data: Tensor, **layer_kwargs: object
    ) -> tuple[NestedTensor, Output]:
        """Applies all layers to the next positions."""

        def apply(state: NestedTensor, **kwargs: object) -> tuple[NestedTensor, Output]:
            return self.layer.extend_step(state, **kwargs)

        states, output = self._loop(apply, cached_states["layer"], data, **layer_kwargs)
        return struct.VDict(layer=states), output

    def _loop(
        self, apply: Callable[..., tuple[Any, Output]], states: object, data: Tensor, **kwargs: Any
    ) -> tuple[Any, Output]:
        cfg = self.config
        return_aux = kwargs.get("return_aux")
        kwargs = _aux_to_carry(cfg.carry, {"data": data, **kwargs})
        carried = {name: kwargs.pop(name) for name in cfg.carry or ("data",)}
        scanned = _pop_scanned(cfg.scan_kwargs, kwargs)

        def step(
            carried: dict[str, Any], x: tuple[NestedTensor, dict[str, Any]]
        ) -> tuple[dict[str, Any], Any]:
            state, own = x
            state, output = apply(state, **carried, **own, **kwargs)
            rest = _select_outputs(output, return_aux)._replace(data=None)
            return {name: getattr(output, name) for name in carried}, (state, rest)

        carried, (states, rest) = self._run(step, carried, xs=(states, scanned))
        last_kv_state = jax.tree.map(lambda x: x[-1], rest.self_attention_kv_state)
        return states, rest._replace(data=carried["data"], self_attention_kv_state=last_kv_state)


class RepeatedTransformerLayer(BaseStackedTransformerLayer):
    """Stack with one child in a loop, whose parameters have a leading axis of layers."""

    class Config(BaseStackedTransformerLayer.Config):
        repeat: Repeat.Config = TransformerRepeat.default_config()

    _decoding_child = "repeat"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.peak_stochastic_depth_rate:
            raise errors.LayerConfigError(
                f"{self.path()}: peak_stochastic_depth_rate={cfg.peak_stochastic_depth_rate} sets "
                "a rate per layer, but repeated layers share one config; use "
                "StackedTransformerLayer, or set the rate of layer's stochastic_depth."
            )
        repeat = cfg.repeat.set(layer=self._with_input_dim(cfg.layer), num_layers=cfg.num_layers)
        self._add_child("repeat", repeat.set(carry=cfg.carry, scan_kwargs=cfg.scan_kwargs))


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
        if names_which_can_be_saved and re.fullmatch(names_which_can_be_saved, name):
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
        policy=config.config_for_function(save_and_offload_these_names_regex).set(
            names_which_can_be_saved=save_pattern,
            names_which_can_be_offloaded=offload_pattern,
            offload_dst=offload_dst,
        ),
    )
