"""`weft.generate`: texts from a language model, and the `Generator` that it is made of."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard, overload

import jax
import numpy as np

from weft import errors
from weft.generation.decoding_models import DecodingWeights, decoding_model
from weft.generation.engine import Engine, Request
from weft.generation.sampler import Sampling
from weft.generation.text import Completion, StreamedText, TextOfSequence
from weft.hierarchy import Module
from weft.input.chat import ChatTemplate, Message
from weft.input.tokenizers import Tokenizer, encode_prompt, without_bos
from weft.interop.huggingface import (
    check_generates_text,
    from_huggingface,
    load_tokenizer,
)
from weft.interop.huggingface.tokenizer import has_tokenizer
from weft.trainer import run_dir
from weft.trainer.trained_model import TrainedModel
from weft.typing import NestedTensor

Prompt = str | Sequence[int] | np.ndarray | Sequence[Message]
"""A text, the ids of its tokens, or the messages of a conversation."""

# Between calls of the compiled program, texts are searched for stop strings.
_STEPS_WITH_STOP = 8


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A language model with all that generation needs.

    Attributes:
        layer: layer of the hierarchy, or a `LibraryModel`; see `decoding_model`.
        params: its parameters.
        tokenizer: None if prompts are ids of tokens, and the results too.
        end_ids: the tokens that end a text.
        start_ids: the tokens before each text.
        chat_template: writes conversations; None if the model knows none.
    """

    layer: Module
    params: NestedTensor = dataclasses.field(repr=False)
    tokenizer: Tokenizer | None = None
    end_ids: Sequence[int] = ()
    start_ids: Sequence[int] = ()
    chat_template: ChatTemplate | None = None


AnyLanguageModel = LanguageModel | TrainedModel[Any] | str | os.PathLike[str]
"""A `LanguageModel`, the result of `weft.load`, or the folder of a Hugging Face checkpoint."""


def language_model(
    model: AnyLanguageModel, tokenizer: Tokenizer | None = None
) -> LanguageModel:
    """Returns what generation needs of a model.

    Args:
        tokenizer: that of the model; None for the folder's own, or for none.

    Raises:
        GenerationError: if the model generates no text, or the folder is that of a run.
        HuggingFaceConfigError: if the folder has a model of an unknown kind, or an encoder.
        WeightsReadError: if the folder has no checkpoint.
    """
    if isinstance(model, LanguageModel):
        if tokenizer is None:
            return model
        return dataclasses.replace(model, tokenizer=tokenizer)
    if isinstance(model, TrainedModel):
        return _of_trained_model(model, tokenizer)
    return _of_folder(model, tokenizer)


def _of_trained_model(
    model: TrainedModel[Any], tokenizer: Tokenizer | None
) -> LanguageModel:
    batch = {"input_ids": np.zeros((1, 1), np.int32)}
    layer = model.layer(batch)
    end_ids = run_dir.end_ids(layer.config)
    start_ids: list[int] = []
    if tokenizer is not None:
        # A document begins with the end of the one before.
        start_ids = [tokenizer.eos_id]
        end_ids += [tokenizer.eos_id, tokenizer.pad_id]
    return LanguageModel(layer, model.variables, tokenizer, end_ids, start_ids)


def _of_folder(
    folder: str | os.PathLike[str], tokenizer: Tokenizer | None
) -> LanguageModel:
    _check_is_no_run(folder)
    check_generates_text(folder)
    cfg, params = from_huggingface(folder)
    layer: Any = cfg.set(name="model").instantiate(parent=None)
    text_tokenizer: Any = tokenizer
    template = None
    if tokenizer is None and has_tokenizer(folder):
        text_tokenizer, template = load_tokenizer(folder)
    return LanguageModel(
        layer,
        params,
        text_tokenizer,
        end_ids=run_dir.end_ids(cfg),
        start_ids=getattr(text_tokenizer, "bos_ids", ()),
        chat_template=template,
    )


def _check_is_no_run(folder: str | os.PathLike[str]) -> None:
    name = os.fspath(folder)
    if Path(name, "config.json").exists() or not run_dir.was_started(name):
        return
    raise errors.GenerationError(
        f"{name!r} is the directory of a run; expected a model, or the folder of a Hugging Face "
        f"checkpoint. Load the model of the run, and pass it with the tokenizer of the run's "
        f"data, such as weft.input.ByteTokenizer(): weft.generate(weft.load({name!r}), prompts, "
        "tokenizer=tokenizer). Or generate with weft sample."
    )


class Generator:
    """Generates texts with a model, and keeps its compiled programs and caches between calls.

    Args:
        model: see `weft.generate`.
        tokenizer: see `weft.generate`.
        batch_size: number of sequences to compute at once, if there are so many.
        expected_tokens: number of tokens to generate in all calls, if they are few; compiling then
            takes less time.
        weights: see `weft.generate`.
    """

    def __init__(
        self,
        model: AnyLanguageModel,
        *,
        tokenizer: Tokenizer | None = None,
        batch_size: int = 32,
        expected_tokens: int | None = None,
        weights: DecodingWeights | None = None,
    ):
        self.model = language_model(model, tokenizer)
        self._decoding_model = decoding_model(self.model.layer, weights)
        self._engine = Engine(
            self._decoding_model,
            self.model.params,
            end_ids=self.model.end_ids,
            batch_size=batch_size,
            expected_tokens=expected_tokens,
        )
        # The engine has its own, in int8 or unstacked.
        self.model = dataclasses.replace(self.model, params={})

    def set_params(self, params: NestedTensor) -> None:
        """Replaces the model's parameters, such as by those after further training."""
        self._engine.set_params(params)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], **settings: Any
    ) -> list[Completion]:
        """Returns `n` continuations of each prompt, in the order of the prompts.

        Arguments and errors are those of `weft.generate`.
        """
        requests, texts, sampling, steps = self._requests(prompts, **settings)
        for _ in self._engine.run(requests, texts, sampling, steps=steps):
            pass
        return [text.completion() for text in texts]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], **settings: Any
    ) -> Iterator[StreamedText]:
        """Yields parts of the texts as soon as they are generated.

        Arguments and errors are those of `weft.generate`.
        """
        requests, texts, sampling, _ = self._requests(prompts, **settings)
        return self._stream(requests, texts, sampling)

    def _stream(
        self,
        requests: Sequence[Request],
        texts: Sequence[TextOfSequence],
        sampling: Sampling,
    ) -> Iterator[StreamedText]:
        for _ in self._engine.run(requests, texts, sampling, steps=1):
            for text in texts:
                part = text.take_streamed()
                if part is not None:
                    yield part

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        tokens: int = 128,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: str | Sequence[str] = (),
        n: int = 1,
        seed: int = 0,
    ) -> tuple[list[Request], list[TextOfSequence], Sampling, int]:
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )
        for name, value in (("tokens", tokens), ("n", n)):
            if value < 1:
                raise errors.GenerationError(
                    f"{name}={value}; expected 1, or more."
                )
        stop_strings = [stop] if isinstance(stop, str) else list(stop)
        stop_strings, end_ids = self._check_stop(stop_strings)
        requests: list[Request] = []
        texts: list[TextOfSequence] = []
        key = jax.random.key(seed)
        for prompt_index, prompt in enumerate(_as_list(prompts)):
            ids = self._encode(prompt, prompt_index)
            num_tokens = tokens
            max_length = self._decoding_model.max_length
            if max_length is not None:
                num_tokens = min(tokens, max_length - len(ids))
            prompt_key = jax.random.fold_in(key, prompt_index)
            for sample_index in range(n):
                sample_key = jax.random.fold_in(prompt_key, sample_index)
                requests.append(Request(ids, num_tokens, sample_key))
                text = TextOfSequence(
                    tokenizer=self.model.tokenizer,
                    prompt=ids,
                    end_ids=end_ids,
                    stop=stop_strings,
                    tokens=num_tokens,
                    prompt_index=prompt_index,
                    sample_index=sample_index,
                )
                texts.append(text)
        steps = _STEPS_WITH_STOP if stop else 64
        return requests, texts, sampling, steps

    def _check_stop(
        self, stop: Sequence[str]
    ) -> tuple[list[str], Sequence[int]]:
        if stop and self.model.tokenizer is None:
            raise errors.GenerationError(
                f"stop={list(stop)!r} needs a tokenizer, which the model has not; pass "
                "tokenizer=."
            )
        for text in stop:
            if not text:
                raise errors.GenerationError(
                    "stop has an empty text, which is in every text; leave it out."
                )
        end_ids = list(self.model.end_ids)
        stop_strings: list[str] = []
        for text in stop:
            special_id = self._special_id(text)
            if special_id is None:
                stop_strings.append(text)
            else:
                end_ids.append(special_id)
        return stop_strings, end_ids

    def _special_id(self, text: str) -> int | None:
        """Returns the id of a special token that a text spells; decoded texts do not show it."""
        tokenizer: Any = self.model.tokenizer
        ids = encode_prompt(without_bos(tokenizer), text)
        if len(ids) == 1 and not tokenizer.decode(ids):
            return int(ids[0])
        return None

    def _encode_conversation(self, messages: Sequence[Message]) -> np.ndarray:
        template, tokenizer = self.model.chat_template, self.model.tokenizer
        if template is None or tokenizer is None:
            raise errors.GenerationError(
                "the prompt is a conversation, and the model has no chat template; pass a text, "
                "or a LanguageModel with chat_template=."
            )
        return template.encode(
            messages, tokenizer=tokenizer, add_generation_prompt=True
        )

    def _encode(self, prompt: Prompt, index: int) -> np.ndarray:
        model = self.model
        if isinstance(prompt, str):
            if model.tokenizer is None:
                raise errors.GenerationError(
                    f"prompt {index} is a text, and the model has no tokenizer; pass tokenizer=, "
                    "or the ids of tokens."
                )
            ids = [*model.start_ids, *encode_prompt(model.tokenizer, prompt)]
            # Without any token there is nothing to continue.
            ids = ids or list(model.end_ids[:1])
        elif _is_conversation(prompt):
            ids = self._encode_conversation(prompt)
        else:
            ids = prompt
        tokens = np.asarray(ids, np.int32)
        if len(tokens) == 0:
            raise errors.GenerationError(
                f"prompt {index} has no tokens; expected one, or more."
            )
        vocab_size = self._decoding_model.vocab_size
        if vocab_size is not None and not (
            tokens.min() >= 0 and tokens.max() < vocab_size
        ):
            raise errors.GenerationError(
                f"prompt {index} has tokens from {tokens.min()} to {tokens.max()}, and the model "
                f"has those from 0 to {vocab_size - 1}; pass the tokenizer of the model."
            )
        max_length = self._decoding_model.max_length
        if max_length is not None and len(tokens) >= max_length:
            raise errors.GenerationError(
                f"prompt {index} has {len(tokens)} tokens, and the model has positions for "
                f"{max_length}, the new ones included; pass a shorter prompt."
            )
        return tokens


def _is_conversation(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    prompt_list: list[Any] = list(prompts)
    is_prompt = prompt_list and isinstance(
        prompt_list[0], int | np.integer | Mapping
    )
    return [prompt_list] if is_prompt else prompt_list


@overload
def generate(
    model: AnyLanguageModel,
    prompts: Prompt | Sequence[Prompt],
    *,
    tokens: int = ...,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    min_p: float | None = ...,
    repetition_penalty: float | None = ...,
    stop: str | Sequence[str] = ...,
    n: int = ...,
    seed: int = ...,
    tokenizer: Tokenizer | None = ...,
    batch_size: int = ...,
    weights: DecodingWeights | None = ...,
    stream: Literal[False] = ...,
) -> list[Completion]: ...
@overload
def generate(
    model: AnyLanguageModel,
    prompts: Prompt | Sequence[Prompt],
    *,
    tokens: int = ...,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    min_p: float | None = ...,
    repetition_penalty: float | None = ...,
    stop: str | Sequence[str] = ...,
    n: int = ...,
    seed: int = ...,
    tokenizer: Tokenizer | None = ...,
    batch_size: int = ...,
    weights: DecodingWeights | None = ...,
    stream: Literal[True],
) -> Iterator[StreamedText]: ...
def generate(
    model: AnyLanguageModel,
    prompts: Prompt | Sequence[Prompt],
    *,
    tokens: int = 128,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    stop: str | Sequence[str] = (),
    n: int = 1,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
    batch_size: int = 32,
    weights: DecodingWeights | None = None,
    stream: bool = False,
) -> list[Completion] | Iterator[StreamedText]:
    """Generates continuations of prompts.

    For several calls with one model, make a `weft.generation.Generator`, which keeps compiled
    programs and caches.

    Args:
        model: a `LanguageModel`, the result of `weft.load`, or the folder of a Hugging Face
            checkpoint.
        prompts: texts, ids of tokens, or conversations, which are lists of messages with `role`
            and `content`; or one prompt alone. Their lengths may differ.
        tokens: largest number of tokens to add to each prompt.
        temperature: divides the logits; 0 for the likeliest tokens, of equal ones the first.
        top_k: number of likeliest tokens to choose from.
        top_p: choose from the fewest likeliest tokens whose probabilities reach this sum.
        min_p: choose from tokens that have at least this part of the largest probability.
        repetition_penalty: above 1, makes tokens of the prompt and the text less likely.
        stop: texts at which to stop; they are not part of the result.
        n: number of continuations of each prompt.
        seed: of everything that is drawn. A continuation depends on it, and on the place of its
            prompt among the prompts, but not on the other prompts or on the batch size.
        tokenizer: that of the model, if it is not in the folder.
        batch_size: number of sequences to compute at once, if there are so many. The next one
            starts as soon as one has ended.
        weights: "int8" to generate with the weights of linear maps and embeddings in 8 bits, which
            take about a quarter of the memory of float32; None for those of the model.
        stream: whether to return an iterator of parts of the texts.

    Returns:
        A `Completion` for each continuation, `n` in a row for each prompt; or an iterator of
        `StreamedText`.

    Raises:
        GenerationError: if an argument does not fit the model, or is out of range.
        ChatTemplateError: if the chat template refuses a conversation.
    """
    generator = Generator(
        model, tokenizer=tokenizer, batch_size=batch_size, weights=weights
    )
    settings = {
        "tokens": tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop,
        "n": n,
        "seed": seed,
    }
    if stream:
        return generator.stream(prompts, **settings)
    return generator.generate(prompts, **settings)
