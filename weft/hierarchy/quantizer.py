"""Vector quantizers: layers that replace vectors by entries of codebooks.

Inputs are `Float[Array, "batch time input_dim"]`. Each of `num_codebooks` codebooks has
`codebook_size` vectors of size `codebook_dim`, in the parameter `codebook` of shape (codebook_size,
num_codebooks, codebook_dim).
"""

import dataclasses
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from weft import config, errors, functional
from weft.config import REQUIRED, ConfigOr, InstantiableConfig, Required
from weft.functional.arrays import counted
from weft.hierarchy import metrics, param_init, parameter_spec
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.layers.linear import MultiLinear
from weft.hierarchy.module import Module
from weft.typing import Tensor


class SimilarityMetric(enum.Enum):
    """Similarity of vectors."""

    L2_DISTANCE = "l2_distance"
    """The smallest distance."""
    DOT_PRODUCT = "dot_product"
    """The largest scalar product."""


class BaseQuantizer(BaseLayer):
    """Base of quantizers. A subclass defines `forward`.

    Quantizers report about their choices among real frames:

        codebook/num_frames   number of frames that are not padding
        codebook/coverage     share of the vectors that were chosen at least once
        codebook/entropy      entropy of the distribution of choices, in nats
        codebook/pplx         perplexity, exp(entropy): the effective number of vectors in use

    The last three are means over codebooks.
    """

    class Config(BaseLayer.Config):
        """Configures a BaseQuantizer.

        The parameter `codebook` has the shape `(codebook_size, num_codebooks, codebook_dim)`.
        Without a `param_init` with a rule for "codebook", codebooks start as standard normal.
        """

        codebook_size: Required[int] = REQUIRED
        codebook_dim: Required[int] = REQUIRED
        num_codebooks: Required[int] = REQUIRED

    class Output(NamedTuple):
        """Quantized frames.

        Attributes:
          ids: `Int[Array, "batch time num_codebooks"]`, the chosen entries; -1 for padding.
          quantized_vectors: `Float[Array, "batch time num_codebooks codebook_dim"]`; 0 for padding.
          loss: a scalar to add to that of the model, if the quantizer has one.
        """

        ids: Tensor
        quantized_vectors: Tensor
        loss: Tensor | None = None

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        shape = (cfg.codebook_size, cfg.num_codebooks, cfg.codebook_dim)
        initializer = (
            param_init.gaussian_initializer(std=1.0)
            if cfg.param_init is None
            else None
        )
        mesh_axes = cfg.param_partition_spec
        return {
            "codebook": ParameterSpec(
                shape, mesh_axes=mesh_axes, initializer=initializer
            )
        }

    def forward(self, inputs: Tensor, paddings: Tensor | None = None) -> Output:
        """Quantizes frames.

        Args:
          paddings: `Bool[Array, "batch time"]`, True for frames to ignore; none by default.
        """
        raise NotImplementedError(type(self))

    def lookup(self, ids: Tensor) -> Output:
        """Returns the vectors of `ids`, `Int[Array, "*batch num_codebooks"]`; 0 for id -1."""
        vectors = functional.codebook_entries(self.parameters["codebook"], ids)
        return self.Output(ids, jnp.where(ids[..., None] < 0, 0, vectors))

    def _padded(self, output: Output, paddings: Tensor | None) -> Output:
        """Returns the output with padding, and reports about it."""
        ids, vectors = output.ids, output.quantized_vectors
        if paddings is None:
            paddings = jnp.zeros(ids.shape[:-1], jnp.bool_)
        is_padding = paddings.astype(jnp.bool_)[..., None]
        onehots = jax.nn.one_hot(ids, self.config.codebook_size)
        pplx, entropy = functional.compute_code_pplx(onehots, paddings)
        num_frames = jnp.sum(~is_padding)
        self.add_summary("codebook/num_frames", num_frames)
        coverage = functional.compute_code_coverage(onehots, paddings)
        for name, value in (
            ("coverage", coverage),
            ("entropy", entropy),
            ("pplx", pplx),
        ):
            self.add_summary(
                f"codebook/{name}", metrics.WeightedScalar(value, num_frames)
            )
        return output._replace(
            ids=jnp.where(is_padding, -1, ids),
            quantized_vectors=jnp.where(is_padding[..., None], 0, vectors),
        )


def quantize_by_nearest_neighbor(
    inputs: Tensor,
    *,
    codebook: Tensor,
    metric: SimilarityMetric = SimilarityMetric.L2_DISTANCE,
) -> BaseQuantizer.Output:
    """Returns the most similar entry of each codebook.

    Args:
      inputs: `Float[Array, "*batch num_codebooks codebook_dim"]`.
      codebook: `Float[Array, "codebook_size num_codebooks codebook_dim"]`.

    >>> codebook = jnp.array([[[0.0]], [[2.0]]])
    >>> quantize_by_nearest_neighbor(jnp.array([[[0.9]], [[1.1]]]), codebook=codebook).ids.tolist()
    [[0], [1]]
    """
    ids = functional.nearest_codes(inputs, codebook, metric=metric.value)
    return BaseQuantizer.Output(
        ids, functional.codebook_entries(codebook, ids).astype(inputs.dtype)
    )


class RandomVectorQuantizer(BaseQuantizer):
    """Quantizer by a random projection and a random codebook, which are never trained.

    Its ids are targets for self-supervised learning (BEST-RQ: Chiu et al., 2022).
    """

    class Config(BaseQuantizer.Config):
        """Configures a RandomVectorQuantizer."""

        input_dim: Required[int] = REQUIRED
        rand_proj: InstantiableConfig = MultiLinear.default_config().set(
            bias=False
        )
        """Linear map to one vector per codebook."""
        normalize_codebook: bool = True
        normalize_inputs: bool = True
        similarity_metric: SimilarityMetric = SimilarityMetric.L2_DISTANCE

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        dims = {
            "num_outputs": cfg.num_codebooks,
            "output_dim": cfg.codebook_dim,
        }
        self._add_child(
            "rand_proj", cfg.rand_proj.set(input_dim=cfg.input_dim, **dims)
        )

    def create_parameter_specs_recursively(self) -> dict[str, Any]:
        """Returns the specs of all parameters, which are state that nothing updates."""
        specs = super().create_parameter_specs_recursively()
        return jax.tree.map(
            lambda spec: dataclasses.replace(spec, is_state=True), specs
        )

    def forward(
        self, inputs: Tensor, paddings: Tensor | None = None
    ) -> BaseQuantizer.Output:
        cfg = self.config
        x, codebook = self.rand_proj(inputs), self.parameters["codebook"]
        if cfg.normalize_inputs:
            x = functional.l2_normalize(x, eps=1e-12)
        if cfg.normalize_codebook:
            codebook = functional.l2_normalize(codebook, eps=1e-12)
        output = quantize_by_nearest_neighbor(
            x, codebook=codebook, metric=cfg.similarity_metric
        )
        return jax.lax.stop_gradient(self._padded(output, paddings))


class KmeansVectorQuantizer(BaseQuantizer):
    """Quantizer by the nearest vectors of trained codebooks (van den Oord et al., 2017).

    An input of size `num_codebooks * codebook_dim` is one vector per codebook. The gradient with
    respect to the quantized vectors becomes that of the inputs (straight-through). The loss trains
    the codebooks: `mse(stop_gradient(x), q) + beta * mse(x, stop_gradient(q))`; both terms are also
    summaries, `kmeans_loss` and `commitment_loss`.
    """

    class Config(BaseQuantizer.Config):
        """Configures a KmeansVectorQuantizer; `beta` is the weight of the commitment loss."""

        beta: float = 0.25

    def forward(
        self, inputs: Tensor, paddings: Tensor | None = None
    ) -> BaseQuantizer.Output:
        cfg = self.config
        if inputs.shape[-1] != cfg.num_codebooks * cfg.codebook_dim:
            raise errors.ArgumentShapeError(
                f"{self.path()}: inputs of shape {inputs.shape}; expected a last axis of "
                f"num_codebooks * codebook_dim = {cfg.num_codebooks * cfg.codebook_dim}."
            )
        where = (
            None
            if paddings is None
            else ~paddings.astype(jnp.bool_)[..., None, None]
        )
        x = inputs.reshape(
            *inputs.shape[:-1], cfg.num_codebooks, cfg.codebook_dim
        )
        x = counted(x, where)
        output = quantize_by_nearest_neighbor(
            x, codebook=self.parameters["codebook"]
        )
        q, fixed = output.quantized_vectors, jax.lax.stop_gradient
        kmeans_loss, _ = functional.weighted_mean(
            functional.squared_error(fixed(x), q), where
        )
        commitment_loss, _ = functional.weighted_mean(
            functional.squared_error(x, fixed(q)), where
        )
        self.add_summary("kmeans_loss", kmeans_loss)
        self.add_summary("commitment_loss", commitment_loss)
        # The difference is 0, but its gradient is not.
        through = fixed(q) + (x - fixed(x))
        loss = kmeans_loss + cfg.beta * commitment_loss
        return self._padded(self.Output(output.ids, through, loss), paddings)


class GumbelSoftmaxVectorQuantizer(BaseQuantizer):
    """Quantizer that draws entries from a learned distribution (Jang et al., 2017).

    In training, ids are drawn by adding Gumbel noise to the logits of `input_proj`, and the
    gradient is that of a softmax with a temperature. Otherwise, the most probable entry is chosen.
    The state `step` counts the training steps.
    """

    class Config(BaseQuantizer.Config):
        """Configures a GumbelSoftmaxVectorQuantizer."""

        input_dim: Required[int] = REQUIRED
        input_proj: InstantiableConfig = MultiLinear.default_config()
        """Linear map to one logit per entry."""
        temperature_schedule: ConfigOr[Any] = 1.0
        """Temperature, or function from the number of steps so far to it."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._temperature: Any = config.maybe_instantiate(
            cfg.temperature_schedule
        )
        dims = {
            "num_outputs": cfg.num_codebooks,
            "output_dim": cfg.codebook_size,
        }
        self._add_child(
            "input_proj", cfg.input_proj.set(input_dim=cfg.input_dim, **dims)
        )

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        step = parameter_spec.constant_spec(
            (), value=0, dtype=jnp.int32, is_state=True
        )
        return {**super()._create_layer_parameter_specs(), "step": step}

    def forward(
        self, inputs: Tensor, paddings: Tensor | None = None
    ) -> BaseQuantizer.Output:
        if paddings is not None:
            inputs = counted(inputs, ~paddings.astype(jnp.bool_)[..., None])
        codebook = self.parameters["codebook"].astype(inputs.dtype)
        logits = self.input_proj(inputs).astype(jnp.float32)
        if self.is_training:
            key = self.require_prng_key("the noise")
            logits = logits + jax.random.gumbel(key, logits.shape)
        ids = jnp.argmax(logits, axis=-1)
        weights = jax.nn.one_hot(ids, self.config.codebook_size)
        if self.is_training:
            probs = jax.nn.softmax(logits / self._next_temperature(), axis=-1)
            weights = weights + (probs - jax.lax.stop_gradient(probs))
        vectors = jnp.einsum(
            "...gv,vgd->...gd", weights.astype(codebook.dtype), codebook
        )
        return self._padded(self.Output(ids, vectors), paddings)

    def _next_temperature(self) -> Tensor:
        step, schedule = self.parameters["step"], self._temperature
        temperature = jnp.asarray(
            schedule(step) if callable(schedule) else schedule, jnp.float32
        )
        self.add_state_update("step", step + 1)
        self.add_summary("temperature", temperature)
        return temperature
