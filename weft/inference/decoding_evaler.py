r"""Evaler that samples text from a language model.

The first tokens of each input sequence are the prompt. The sampled continuations are written next
to the summaries, one JSON object per line, and the first few are shown as summaries:

    summaries/samples/step_00000200.jsonl    {"prompt": "def f(", "text": "x):\n    return"}

Samples depend only on parameters, prompts and the run's key, so a resumed run repeats them.
"""

import json
import os
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from weft import config, errors, functional
from weft.functional import arrays
from weft.hierarchy.module import Module
from weft.input.tokenizers import Tokenizer, as_tokenizer, until_end
from weft.serialization.directory import Directory
from weft.trainer import evaler, run_dir
from weft.trainer.metric_calculator import BaseMetricCalculator
from weft.typing import NestedTensor, Tensor


class SampleDecoding(BaseMetricCalculator):
    """Calculator that samples a continuation of the first tokens of each sequence.

    Its output for a batch is a dict of `prompts` and `sampled`, `Int[Array, "batch ..."]`.
    """

    class Config(BaseMetricCalculator.Config):
        """Configures a SampleDecoding."""

        tokenizer: config.Required[config.ConfigOr[Tokenizer] | str] = (
            config.REQUIRED
        )
        """Converts ids to text; may be the path of a tokenizer's file."""
        prompt_length: int = 16
        """Number of tokens of a prompt, including a first token that is not text, such as the
        beginning of a document."""
        num_tokens: int = 64
        """Maximal number of tokens to sample."""
        logits_modifier: config.InstantiableConfig = config.config_for_function(
            functional.scale_by
        ).set(temperature=1.0)
        """Temperature and cut-offs, as for the model's `sample_decode`."""
        prompt_field: str = "input_ids"
        """The field of a batch that holds tokens, `Int[Array, "batch time"]`."""
        num_shown: int = 2
        """Number of texts to show as summaries."""

    def __init__(self, cfg: Config, *, parent: Module | None, **kwargs: Any):
        super().__init__(cfg, parent=parent, **kwargs)
        if cfg.prompt_length < 1 or cfg.num_tokens < 1:
            raise errors.DecodingEvalError(
                f"{self.path()}: prompt_length={cfg.prompt_length} and num_tokens={cfg.num_tokens};"
                " expected at least one token of each."
            )
        self._tokenizer = as_tokenizer(cfg.tokenizer)
        self._end_ids = run_dir.end_ids(self._model.config)
        modifier = config.maybe_instantiate(cfg.logits_modifier)

        def inputs(batch: NestedTensor) -> dict[str, Any]:
            return {
                "input_batch": self._prefixes(_fields_of(batch)),
                "max_sequence_length": cfg.prompt_length - 1 + cfg.num_tokens,
                "logits_modifier": modifier,
            }

        def outputs(
            batch: NestedTensor, result: Any, collection: Any
        ) -> dict[str, Tensor]:
            fields = _fields_of(batch)
            first_sequences = result.sequences[
                :, 0
            ]  # (batch, time), the best of each
            return {
                "prompts": self._prompts(fields),
                "sampled": self._continuations(fields, first_sequences),
            }

        self._run = self._jit_of_model(
            "sample_decode", inputs=inputs, outputs=outputs
        )

    def _prompts(self, batch: Mapping[str, Tensor]) -> Tensor:
        cfg = self.config
        tokens = batch.get(cfg.prompt_field)
        if tokens is None or tokens.shape[1] < cfg.prompt_length:
            reason = (
                "the field is missing"
                if tokens is None
                else f"it has {tokens.shape[1]}"
            )
            raise errors.DecodingEvalError(
                f"{self.path()}: prompts are the first prompt_length={cfg.prompt_length} tokens of "
                f"{cfg.prompt_field!r}, but {reason}. The batch has "
                f"{', '.join(sorted(map(str, batch)))}."
            )
        return tokens[:, : cfg.prompt_length]

    def _prefixes(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        lengths = self._prompt_lengths(batch)
        return arrays.without_none(
            prefix=self._prompts(batch), prefix_len=lengths
        )

    def _prompt_lengths(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Returns the lengths of the prompts, less for short sequences; None if not known."""
        live = batch.get("input_segment_ids", batch.get("live_targets"))
        if live is None:
            return None
        position_ends = jnp.arange(1, live.shape[1] + 1)[None]  # (1, time)
        lengths = jnp.max(jnp.where(live != 0, position_ends, 1), axis=1)
        return jnp.minimum(lengths, self.config.prompt_length)

    def _continuations(
        self, batch: Mapping[str, Tensor], sequences: Tensor
    ) -> Tensor:
        """Returns the tokens that follow each prompt; sequences begin after its first token."""
        lengths = self._prompt_lengths(batch)
        if lengths is None:
            return sequences[:, self.config.prompt_length - 1 :]
        positions = (
            lengths[:, None] - 1 + jnp.arange(self.config.num_tokens)[None]
        )
        return jnp.take_along_axis(sequences, positions, axis=1)

    def get_summaries(
        self,
        *,
        model_params: NestedTensor,
        state: dict[str, Any],
        all_forward_outputs: list[Any],
    ) -> dict[str, Any]:
        samples = self.texts(all_forward_outputs)
        summaries: dict[str, Any] = {}
        for i, sample in enumerate(samples[: self.config.num_shown]):
            summaries[f"sample_{i}"] = sample["prompt"] + sample["text"]
        lengths = [sample["num_tokens"] for sample in samples]
        summaries["num_tokens"] = float(np.mean(lengths))
        return self._with_prefix(summaries)

    def texts(self, all_forward_outputs: list[Any]) -> list[dict[str, Any]]:
        """Returns the samples as JSON values: `prompt`, `text` and `num_tokens`, those sampled."""
        samples = []
        for outputs in all_forward_outputs:
            for prompt, sampled in zip(
                outputs["prompts"], outputs["sampled"], strict=True
            ):
                continuation = until_end(
                    sampled, self._tokenizer, self._end_ids
                )
                sample = {
                    "prompt": self._tokenizer.decode(prompt),
                    "text": self._tokenizer.decode(continuation),
                    "num_tokens": len(continuation),
                }
                samples.append(sample)
        return samples


def _fields_of(batch: NestedTensor) -> Mapping[str, Tensor]:
    return cast(Mapping[str, Tensor], batch)


class DecodingEvaler(evaler.SpmdEvaler):
    """Evaler that samples from the model and writes the texts to a file per evaluation."""

    class Config(evaler.SpmdEvaler.Config):
        metric_calculator: SampleDecoding.Config = (
            SampleDecoding.default_config()
        )

    def _on_outputs(self, step: int, outputs: list[Any]) -> None:
        if jax.process_index() == 0:
            directory = self.summary_writer.config.dir
            os.makedirs(directory, exist_ok=True)
            samples = self.metric_calculator.texts(outputs)
            text = "".join(json.dumps(sample) + "\n" for sample in samples)
            Directory(directory).write(f"step_{step:08d}.jsonl", text)
            self._record_for_report(step, samples)

    def _record_for_report(
        self, step: int, samples: list[dict[str, Any]]
    ) -> None:
        """Adds the texts that are shown to the record of the run, from which its report is."""
        run_directory = getattr(getattr(self.parent, "config", None), "dir", "")
        record_path = os.path.join(run_directory, run_dir.RECORD_FILE)
        if not run_directory or not os.path.exists(record_path):
            return
        recorded_samples = run_dir.read_record(run_directory).get("samples", [])
        shown_samples: list[dict[str, Any]] = []
        for sample in recorded_samples:
            if sample["step"] < step:
                shown_samples.append(sample)
        num_shown = self.metric_calculator.config.num_shown
        for sample in samples[:num_shown]:
            shown_sample = {
                "step": step,
                "prompt": sample["prompt"],
                "text": sample["text"],
            }
            shown_samples.append(shown_sample)
        run_dir.update_record(run_directory, samples=shown_samples)
