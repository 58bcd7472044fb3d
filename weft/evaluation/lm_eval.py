"""Model of EleutherAI's evaluation harness, `lm_eval`, that is one of Weft's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft._lazy import import_extra
from weft.errors import EvaluationError
from weft.evaluation.evaluate import context_and_continuation, windows
from weft.evaluation.scorer import Scorer
from weft.generation import Generator
from weft.generation.generator import AnyLanguageModel, language_model
from weft.input.tokenizers import Tokenizer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
else:
    LM = import_extra(
        "lm_eval.api.model", "eval", needed_by="LmEvalModel", package="lm_eval"
    ).LM

_LENGTH = 1024
_MAX_TOKENS = 256


class LmEvalModel(LM):
    """Language model for `lm_eval.simple_evaluate(model=…)`. Needs the extra `eval`.

        import lm_eval
        from weft.evaluation import LmEvalModel

        results = lm_eval.simple_evaluate(model=LmEvalModel("FOLDER"), tasks=["arc_easy"])

    Args:
        model: see `weft.evaluation.evaluate`.
        tokenizer: that of the model, if it has none of its own.
        max_length: largest number of tokens of a context with its continuation; None for the
            positions of the model, or 1,024 if their number is not bounded.

    Raises:
        EvaluationError: if there is no tokenizer.
        GenerationError: if the model predicts no tokens.
    """

    def __init__(
        self,
        model: AnyLanguageModel,
        *,
        tokenizer: Tokenizer | None = None,
        max_length: int | None = None,
    ):
        super().__init__()
        self._model = language_model(model, tokenizer)
        if self._model.tokenizer is None:
            raise EvaluationError(
                "the model has no tokenizer; pass tokenizer=."
            )
        self._scorer = Scorer(self._model, max_length=max_length)
        if self._scorer.max_length is None:
            self._scorer.max_length = _LENGTH
        self._generator = Generator(self._model)

    @property
    def tokenizer_name(self) -> str:
        """Name of the model's tokenizer, which the harness keeps chat templates by."""
        return os.fspath(getattr(self._model.tokenizer, "path", "weft"))

    def apply_chat_template(
        self,
        chat_history: list[dict[str, str]],
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns the text of a conversation in the model's chat template."""
        if self._model.chat_template is None:
            raise EvaluationError("the model has no chat template.")
        return self._model.chat_template.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Returns the log probability of each continuation, and whether it is the likeliest."""
        del disable_tqdm
        pairs = []
        for request in requests:
            context, continuation = _texts(request)
            pairs.append(
                context_and_continuation(
                    self._model, context, context + continuation
                )
            )
        scores = self._scorer.score(pairs)
        return [(score.log_prob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log probability of each text, in windows that do not overlap."""
        del disable_tqdm
        tokenizer, length = self._model.tokenizer, self._scorer.max_length
        assert tokenizer is not None
        assert length is not None
        # The first token is predicted, too.
        start_ids = self._model.start_ids or self._model.end_ids[:1]
        log_probs: list[float] = []
        for request in requests:
            (text,) = _texts(request)
            ids = [*start_ids, *tokenizer.encode(text).tolist()]
            pairs = [
                (ids[begin:start], ids[start:end])
                for begin, start, end in windows(
                    len(ids),
                    first=len(start_ids),
                    length=length,
                    stride=length - 1,
                )
            ]
            scores = self._scorer.score(pairs)
            log_probs.append(sum(score.log_prob for score in scores))
        return log_probs

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """Returns a continuation of each context, up to one of the texts at which to stop."""
        del disable_tqdm
        texts: dict[int, str] = {}
        for settings, indices in _by_settings(requests).items():
            completions = self._generator.generate(
                [requests[index].args[0] for index in indices],
                **dict(settings),
            )
            for index, completion in zip(indices, completions, strict=True):
                texts[index] = completion.text
        return [texts[index] for index in range(len(requests))]


def _texts(request: Instance) -> tuple[str, ...]:
    return request.args


_Settings = tuple[tuple[str, Any], ...]


def _by_settings(requests: Sequence[Instance]) -> dict[_Settings, list[int]]:
    """Returns the indices of requests by their settings, as arguments of `weft.generate`."""
    indices: dict[_Settings, list[int]] = {}
    for index, request in enumerate(requests):
        arguments: Any = request.args
        asked: dict[str, Any] = arguments[1]
        stop = asked.get("until") or ()
        if isinstance(stop, str):
            stop = (stop,)
        temperature = float(asked.get("temperature") or 0.0)
        if not asked.get("do_sample", temperature > 0):
            temperature = 0.0
        settings = {
            "stop": tuple(text for text in stop if text),
            "tokens": int(asked.get("max_gen_toks") or _MAX_TOKENS),
            "temperature": temperature,
            "top_p": asked.get("top_p"),
            "top_k": asked.get("top_k"),
        }
        indices.setdefault(tuple(settings.items()), []).append(index)
    return indices
