"""Causal language models: a decoder, its loss, and decoding."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from weft.config import ConfigOr, config_class
from weft.errors import ArgumentShapeError
from weft.functional import LogitsToLogitsFn
from weft.hierarchy import transforms
from weft.hierarchy.attention_bias import CausalAttentionBias
from weft.hierarchy.base_layer import RematSpec
from weft.hierarchy.base_model import BaseModel
from weft.hierarchy.causal_lm_metrics import (
    AuxLossMetrics,
    BaseLossMetrics,
    CompositeLossMetrics,
    CompositeLossWeights,
    CrossEntropyLossMetrics,
    metrics_config,
    target_statistics,
)
from weft.hierarchy.context import child_context
from weft.hierarchy.decoder import Decoder
from weft.hierarchy.decoding import (
    BeamSearchOutputs,
    BrevityPenaltyFn,
    SampleOutputs,
    StopDecodingCondition,
)
from weft.hierarchy.layers import LayerNorm, set_layer_norm_eps_recursively
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import Module
from weft.hierarchy.param_init import PARAM_REGEXP_WEIGHT, DefaultInitializer, WeightInitializer
from weft.hierarchy.positional import LearnedPositionalEmbedding
from weft.hierarchy.sharding import maybe_shard
from weft.hierarchy.stack import RepeatedTransformerLayer, StackedTransformerLayer
from weft.typing import PartitionSpec, Tensor

__all__ = [
    "AuxLossMetrics",
    "BaseLossMetrics",
    "CompositeLossMetrics",
    "CompositeLossWeights",
    "CrossEntropyLossMetrics",
    "Model",
    "TransformerStackConfig",
    "gpt_decoder_config",
    "layer_norm_config",
    "metrics_config",
    "residual_initializer_cfg",
]

TransformerStackConfig = StackedTransformerLayer.Config | RepeatedTransformerLayer.Config


def _normal_initializer_cfg(scale: float, fan: str | None = None) -> DefaultInitializer.Config:
    weight = WeightInitializer.default_config().set(fan=fan, scale=scale, distribution="normal")
    return DefaultInitializer.default_config().set(init_by_param_name={PARAM_REGEXP_WEIGHT: weight})


class Model(BaseModel):
    """Causal language model.

    A batch is a dict of
      input_ids: `Int[Array, "batch time"]`.
      target_labels: `Int[Array, "batch time"]`: the token after each input. Negative ones, those
        beyond the vocabulary, and the decoder's `pad_token_id` do not count.
      target_num_bytes: optional, `Int[Array, "batch"]`: number of bytes of each example's targets,
        for bits per byte.
      input_segment_ids: optional, `Int[Array, "batch time"]`: tokens attend to their own segment; 0
        is padding.
      input_positions: optional, `Int[Array, "batch time"]`, within the segments; by default counted
        from 0.
      token_type_ids: optional, `Int[Array, "batch time"]`, for an embedding of types.
    """

    @config_class
    class Config(BaseModel.Config):
        """Configures a Model.

        Attributes:
          metrics: computes the loss and the metrics from logits.
          batch_axis_names: the mesh axes over which to shard examples; None to not shard inputs.
          seq_axis_names: the mesh axes over which to shard positions.
          scan_chunk: number of positions whose logits are in memory at once; None for all. They are
            recomputed in the backward pass.
        """

        decoder: Decoder.Config = Decoder.default_config()
        metrics: BaseLossMetrics.Config = metrics_config()
        batch_axis_names: tuple[str, ...] | None = ("data",)
        seq_axis_names: tuple[str, ...] | None = None
        scan_chunk: int | None = None

    @classmethod
    def default_config(cls) -> Any:
        """Returns a config whose weights are normal with the standard deviation 0.02."""
        return super().default_config().set(param_init=_normal_initializer_cfg(0.02))

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child("decoder", cfg.decoder)
        self._add_child("metrics", cfg.metrics)

    def forward(
        self, input_batch: Mapping[str, Any], return_aux: bool = False
    ) -> tuple[Tensor, dict[str, Any]]:
        """Computes the loss, and reports it and the metrics as summaries.

        Returns:
          The loss, and a dict, empty unless `return_aux`: `logits` (unless `scan_chunk` is set),
          `hidden_states`, `per_label_loss`, `live_targets`, `Float[Array, "batch time ..."]`.
        """
        batch: dict[str, Any] = self._laid_out(input_batch)
        batch["live_targets"] = self._live_targets(batch["target_labels"])
        predictions = self.predict(batch)
        loss, metrics = self._measure(batch, predictions)
        self.add_summary("loss", loss)
        arrays = {}
        for name, value in metrics.items():
            summaries, rest = _split_metric(value)
            if summaries is not None:
                self.add_summary(name, summaries)
            if rest is not None:
                arrays[name] = rest
        return jnp.asarray(loss.mean), {**predictions, **arrays} if return_aux else {}

    def _laid_out(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        cfg = self.config
        axes = (cfg.batch_axis_names, cfg.seq_axis_names)
        if axes == (None, None):
            return dict(input_batch)
        return {
            name: maybe_shard(x, PartitionSpec(*axes[: x.ndim])) for name, x in input_batch.items()
        }

    def _live_targets(self, labels: Tensor) -> Tensor:
        cfg = self.decoder.config
        return (labels >= 0) & (labels < cfg.vocab_size) & (labels != cfg.pad_token_id)

    def _measure(
        self, batch: dict[str, Any], predictions: dict[str, Any]
    ) -> tuple[WeightedScalar, dict[str, Any]]:
        """Returns the loss and the metrics, from logits or, by chunks, from hidden states."""
        outputs = predictions
        if self.config.scan_chunk is not None:
            statistics = self._chunked_statistics(batch, predictions["hidden_states"])
            outputs = {**predictions, "target_statistics": statistics}
        return self.metrics(
            batch, predict_outputs=outputs, module_outputs=self.get_module_outputs()
        )

    def _chunked_statistics(
        self, batch: dict[str, Any], hidden_states: Tensor
    ) -> dict[str, Tensor]:
        """Returns `target_statistics` without all logits in memory at once."""
        chunk, length = self.config.scan_chunk, hidden_states.shape[1]
        if length % chunk:
            raise ArgumentShapeError(
                f"scan_chunk={chunk} of {self.path()} does not divide the {length} positions of "
                "input_ids; set it to a divisor."
            )

        def to_chunks(x: Tensor) -> Tensor:
            return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

        def from_chunks(x: Tensor) -> Tensor:
            return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], length)

        def of_chunk(carry: None, xs: tuple[Tensor, Tensor, Tensor]) -> tuple[None, Any]:
            hidden_states, labels, live = xs
            logits = self.compute_logits({"hidden_states": hidden_states})
            return carry, target_statistics(logits, labels, live)

        xs = (hidden_states, batch["target_labels"], batch["live_targets"])
        with child_context("scan_chunk", module=self):
            _, statistics = transforms.scan_in_context(
                of_chunk, carry=None, xs=jax.tree.map(to_chunks, xs), remat_kwargs={}
            )
        return jax.tree.map(from_chunks, statistics)

    def predict(self, input_batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Runs the decoder on a batch, ignoring targets.

        Returns:
          A dict of `logits`, `Float[Array, "batch time vocab"]`, unless `scan_chunk` is set, and
          `hidden_states`, `Float[Array, "batch time dim"]`, for `compute_logits`.
        """
        batch = self._laid_out(input_batch)
        names = {
            "input_ids": "input_ids",
            "input_segment_ids": "input_segment_ids",
            "input_positions": "positions",
            "token_type_ids": "token_type_ids",
        }
        outputs = self.decoder({names[k]: x for k, x in batch.items() if k in names})
        if self.config.scan_chunk is not None:
            del outputs["logits"]
        return outputs

    def compute_logits(self, predictions: Mapping[str, Any]) -> Tensor:
        """Returns logits, `Float[Array, "batch time vocab"]`, from the output of `predict`."""
        with child_context("compute_logits", module=self.decoder):
            return self.decoder.compute_logits(predictions)

    def extract_logits(self, input_batch: Mapping[str, Any]) -> Tensor:
        """Returns the logits of the token after each input, `Float[Array, "batch time vocab"]`."""
        predictions = self.predict(input_batch)
        logits = predictions.get("logits")
        return self.compute_logits(predictions) if logits is None else logits

    def score(self, input_batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns a dict of the loss of each target and which targets count.

        These are `per_token_loss`, `Float[Array, "batch time"]`, 0 where a target does not count,
        and `live_targets`, `Bool[Array, "batch time"]`.
        """
        batch: dict[str, Any] = dict(input_batch)
        live = self._live_targets(batch["target_labels"])
        statistics = target_statistics(self.extract_logits(batch), batch["target_labels"], live)
        return {"per_token_loss": statistics["nll"], "live_targets": live}

    def sample_decode(
        self,
        input_batch: Mapping[str, Any],
        *,
        num_decodes: int = 1,
        max_sequence_length: int | None = None,
        logits_modifier: ConfigOr[LogitsToLogitsFn] | None = None,
        stop_decoding_condition: StopDecodingCondition | None = None,
    ) -> SampleOutputs:
        """Samples continuations of prompts.

        Args:
          input_batch: a dict with `prefix`, `Int[Array, "batch length"]`: prompts, padded on the
            right with the decoder's `pad_token_id`. Results omit the first token of each prompt.
          num_decodes: number of continuations per prompt.
          max_sequence_length: the length of a result; `length` if None.
          logits_modifier: temperature and cut-offs, such as
            `chain(scale_by(0.7), top_k_logits(40))`; None samples from the model's distribution.
          stop_decoding_condition: when a sequence is complete; by default at the decoder's
            `eos_token_id`.
        """
        prefix: Tensor = input_batch["prefix"]
        with child_context("sample_decode", module=self.decoder):
            return self.decoder.sample_decode(
                input_batch=input_batch,
                max_sequence_length=max_sequence_length or prefix.shape[1],
                num_decodes=num_decodes,
                logits_modifier=logits_modifier,
                stop_decoding_condition=stop_decoding_condition,
            )

    def beam_search_decode(
        self,
        input_batch: Mapping[str, Any],
        num_decodes: int = 1,
        brevity_penalty: BrevityPenaltyFn | None = None,
        *,
        max_sequence_length: int | None = None,
    ) -> BeamSearchOutputs:
        """Searches for the likeliest continuations of prompts.

        Args:
          input_batch: as for `sample_decode`.
          num_decodes: number of hypotheses to keep, and to return, per prompt.
          brevity_penalty: corrects scores for lengths; see `brevity_penalty_fn`. By default the
            likeliest hypotheses win, which tend to be short.
          max_sequence_length: the length of a result; that of the prompts if None.
        """
        prefix: Tensor = input_batch["prefix"]
        with child_context("beam_search_decode", module=self.decoder):
            return self.decoder.beam_search_decode(
                input_batch=input_batch,
                max_sequence_length=max_sequence_length or prefix.shape[1],
                num_decodes=num_decodes,
                brevity_penalty=brevity_penalty,
            )


def _split_metric(metric: Any) -> tuple[Any, Any]:
    if not isinstance(metric, dict):
        return (metric, None) if isinstance(metric, WeightedScalar) else (None, metric)
    parts = {name: _split_metric(value) for name, value in metric.items()}
    split = [{k: p[i] for k, p in parts.items() if p[i] is not None} for i in (0, 1)]
    return split[0] or None, split[1] or None


def layer_norm_config(eps: float = 1e-5) -> LayerNorm.Config:
    """Returns a config of a LayerNorm with `eps` added to the variance."""
    return LayerNorm.default_config().set(eps=eps)


def residual_initializer_cfg(num_layers: int, scale: float = 0.02) -> DefaultInitializer.Config:
    """Returns an initializer of layers that add to the residual stream, to keep its variance.

    Weights are normal with the standard deviation `scale / sqrt(2 * num_layers)`, since each layer
    adds to the stream twice (Radford et al., 2019, section 2.3).

    Args:
      num_layers: the number of transformer layers.
      scale: the standard deviation of other weights.

    Example:
      >>> cfg = residual_initializer_cfg(num_layers=2)
      >>> cfg.init_by_param_name[".*weight$"].scale
      0.01
    """
    return _normal_initializer_cfg(scale / (2 * num_layers) ** 0.5)


def gpt_decoder_config(
    stack_cfg: TransformerStackConfig,
    num_layers: int,
    hidden_dim: int,
    num_heads: int,
    vocab_size: int,
    max_position_embeddings: int,
    activation_function: str = "nn.relu",
    layer_norm_epsilon: float = 1e-8,
    dropout_rate: float = 0.0,
    layer_remat: RematSpec | None = None,
) -> Decoder.Config:
    """Returns a config of a decoder as in GPT-2 (Radford et al., 2019), with tied embeddings.

    Args:
      stack_cfg: a config of the layer stack.
      hidden_dim: the model dimension; feed-forward layers have four times as many.
      max_position_embeddings: the maximum sequence length.
      activation_function: of the feed-forward layers; see `get_activation_fn`.
      layer_norm_epsilon: added to variances in norms.
      dropout_rate: of all dropouts.
      layer_remat: what each layer recomputes in the backward pass; nothing if None.
    """
    stack = stack_cfg.clone()
    layer: Any = stack.layer
    layer.self_attention.attention.set(
        num_heads=num_heads, mask=CausalAttentionBias.default_config()
    )
    layer.feed_forward.set(hidden_dim=4 * hidden_dim, activation=activation_function)
    residual = residual_initializer_cfg(num_layers)
    layer.feed_forward.linear2.param_init = residual
    layer.self_attention.attention.output_linear.param_init = residual
    if layer_remat is not None:
        layer.remat_spec = layer_remat
    pos_emb = LearnedPositionalEmbedding.default_config().set(
        shape=(max_position_embeddings,), param_init=_normal_initializer_cfg(1.0, fan="fan_out")
    )
    cfg = Decoder.default_config().set(
        transformer=stack.set(num_layers=num_layers, layer=layer),
        dim=hidden_dim,
        vocab_size=vocab_size,
        dropout_rate=dropout_rate,
    )
    cfg.emb.pos_emb = pos_emb
    set_layer_norm_eps_recursively(cfg, layer_norm_epsilon)
    return cfg
