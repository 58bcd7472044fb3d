"""`evaluate`: metrics of a language model on a data set."""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from weft.errors import EvaluationError, did_you_mean
from weft.evaluation import tasks
from weft.evaluation.results import TASKS, EvaluationResult, means
from weft.evaluation.scorer import Scorer
from weft.evaluation.tasks import Question, Row
from weft.generation import Completion, Generator, LanguageModel
from weft.generation.generator import AnyLanguageModel, language_model
from weft.input.datasets import (
    json_lines_dataset,
    parquet_dataset,
    text_dataset,
)
from weft.input.file_cache import document_text
from weft.input.formats import format_of
from weft.input.tokenizers import Tokenizer

Task = Literal["perplexity", "multiple-choice", "exact-match", "pass@k"]
Checker = Callable[[Row, str], bool]
"""Returns whether a completion of the row's prompt is right."""

_LENGTH = 1024
_TEMPERATURE = 0.8


def evaluate(
    model: AnyLanguageModel,
    data: str | os.PathLike[str] | Sequence[Row],
    *,
    task: Task | None = None,
    shots: int = 0,
    examples: str | os.PathLike[str] | Sequence[Row] | None = None,
    chat: bool = False,
    length: int | None = None,
    stride: int | None = None,
    tokens: int = 64,
    stop: str | Sequence[str] | None = None,
    checker: Checker | None = None,
    k: Sequence[int] = (1,),
    n: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    limit: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> EvaluationResult:
    """Evaluates a language model on rows of data.

    Args:
        model: the folder of a Hugging Face checkpoint, the result of `weft.load`, or a
            `weft.generation.LanguageModel`.
        data: a file of text, JSON lines or Parquet, or rows. A row is a dict of `text` for the
            perplexity; of `prompt` (or `question`), `choices` and `answer`, which is one of them,
            its index or its letter; of `prompt` and `answer`, a text or a list of right ones; or
            of `prompt` and what the checker reads.
        task: None for the one that the fields of the first row are for.
        shots: number of solved rows before each prompt.
        examples: where these come from; None for the other rows of the data.
        chat: whether prompts are turns of the user, in the chat template of the model.
        length: number of tokens of a window of text; None for the positions of the model, or 1,024
            if their number is not bounded.
        stride: number of tokens by which the window moves on. The first `length - stride` tokens
            of a window are context only; None for half the length.
        tokens: largest number of tokens of an answer.
        stop: where answers end; None for the end of the line in an exact match without `chat`.
        checker: judges completions, for `pass@k`.
        k: numbers of samples; for each, the probability that at least one is right.
        n: number of samples of each prompt; None for the largest `k`.
        temperature: of the samples; None for 0.8, and for the likeliest tokens in an exact match.
        seed: of samples, and of the choice of solved rows.
        limit: number of rows to use, the first ones.
        tokenizer: that of the model, if it has none of its own.

    Returns:
        The metrics and the answers. The metrics are `perplexity`, `loss` in nats per token, and
        `bits_per_byte` if each token has a context; `accuracy`, of choices by their log
        probability, and `accuracy_per_byte`, by that divided by their length in bytes of UTF-8;
        `exact_match`, of answers without space around them; `pass@1` and so on, the probability
        that one of k samples is right, without bias (Chen et al., 2021).

    Raises:
        EvaluationError: if a row or an argument does not fit the task.
        GenerationError: if the model predicts no tokens.
        InputReadError: if a file cannot be read.
    """
    evaluated = language_model(model, tokenizer)
    if evaluated.tokenizer is None:
        raise EvaluationError("the model has no tokenizer; pass tokenizer=.")
    rows = _rows(data, limit)
    if task is None:
        first_row, name = rows[0]
        task = (
            "pass@k" if checker is not None else tasks.task_of(first_row, name)  # pyright: ignore[reportAssignmentType]
        )
    if task not in TASKS:
        raise EvaluationError(
            f"there is no task {task!r}. {did_you_mean(str(task), TASKS)}"
        )
    if task == "perplexity":
        scorer = Scorer(evaluated)
        return _perplexity(scorer, rows, length, stride)
    if (task == "pass@k") != (checker is not None):
        raise EvaluationError(
            "pass@k needs a checker, a function of a row and a completion, and no other task has "
            "one."
        )
    prompts = _prompts(
        evaluated,
        rows,
        task,
        shots=shots,
        examples=examples,
        chat=chat,
        seed=seed,
    )
    if task == "multiple-choice":
        return _multiple_choice(Scorer(evaluated), prompts)
    if task == "exact-match":
        if stop is None:
            stop = () if chat else "\n"
        completions = Generator(evaluated).generate(
            [prompt.ids for prompt in prompts],
            tokens=tokens,
            temperature=temperature or 0.0,
            stop=stop,
            seed=seed,
        )
        return _exact_match(prompts, completions)
    assert checker is not None
    num_samples = max(k) if n is None else n
    _check_samples(k, num_samples)
    completions = Generator(evaluated).generate(
        [prompt.ids for prompt in prompts],
        tokens=tokens,
        temperature=_TEMPERATURE if temperature is None else temperature,
        stop=stop or (),
        n=num_samples,
        seed=seed,
    )
    return _pass_at_k(prompts, completions, checker, k, num_samples)


# Rows.


class _NamedRow(NamedTuple):
    row: Any
    name: str


def _rows(
    data: str | os.PathLike[str] | Sequence[Row], limit: int | None
) -> list[_NamedRow]:
    if limit is not None and limit < 1:
        raise EvaluationError(f"limit={limit}; expected 1, or more.")
    if isinstance(data, str | os.PathLike):
        path = os.fspath(data)
        datasets = {"json": json_lines_dataset, "parquet": parquet_dataset}
        dataset = datasets.get(format_of(path), text_dataset)(path)
        name_of = dataset.describe
        values: Any = dataset
    else:
        values = list(data)
        name_of = "row {}".format
    num_rows = len(values)
    if limit is not None:
        num_rows = min(num_rows, limit)
    if num_rows == 0:
        raise EvaluationError("the data has no rows; expected one, or more.")
    return [_NamedRow(values[i], name_of(i)) for i in range(num_rows)]


class _Prompt(NamedTuple):
    """A question as the model sees it.

    Attributes:
        ids: tokens before the answer.
        choices: the tokens of each choice.
    """

    question: Question
    name: str
    ids: list[int]
    choices: Sequence[tuple[Sequence[int], Sequence[int]]]


def _prompts(
    model: LanguageModel,
    rows: Sequence[_NamedRow],
    task: str,
    *,
    shots: int,
    examples: str | os.PathLike[str] | Sequence[Row] | None,
    chat: bool,
    seed: int,
) -> list[_Prompt]:
    questions = [tasks.question_of(row, name, task) for row, name in rows]
    solved = questions
    if examples is not None:
        solved = [
            tasks.question_of(row, name, task)
            for row, name in _rows(examples, None)
        ]
    num_others = len(solved) if examples is not None else len(solved) - 1
    if not 0 <= shots <= num_others:
        raise EvaluationError(
            f"shots={shots}, and there are {num_others} other rows to take them from; pass "
            f"examples=, or at most {num_others}."
        )
    if shots and task == "pass@k":
        raise EvaluationError(
            "rows of pass@k have no answers to show; leave shots out, or write them into the "
            "prompts."
        )
    prompts: list[_Prompt] = []
    for index, question in enumerate(questions):
        shown = tasks.examples_for(
            index if examples is None else -1, solved, shots=shots, seed=seed
        )
        if chat:
            prompt = _chat_prompt(model, question, shown)
        else:
            prompt = _text_prompt(model, question, shown)
        prompts.append(prompt._replace(name=rows[index].name))
    return prompts


def _text_prompt(
    model: LanguageModel, question: Question, shown: Sequence[Question]
) -> _Prompt:
    text = tasks.with_examples(question, shown)
    choices = [
        context_and_continuation(model, text, tasks.joined(text, choice))
        for choice in question.choices
    ]
    return _Prompt(question, "", _text_ids(model, text), choices)


def _chat_prompt(
    model: LanguageModel, question: Question, shown: Sequence[Question]
) -> _Prompt:
    if model.chat_template is None:
        raise EvaluationError(
            "the model has no chat template; leave chat out, or use the folder of a model that "
            "has one."
        )
    assert model.tokenizer is not None
    turns: list[dict[str, str]] = []
    for example in shown:
        turns.append({"role": "user", "content": example.prompt})
        turns.append({"role": "assistant", "content": example.answers[0]})
    turns.append({"role": "user", "content": question.prompt})
    ids = model.chat_template.encode(
        turns, tokenizer=model.tokenizer, add_generation_prompt=True
    ).tolist()
    choices = [
        (ids, model.tokenizer.encode(choice).tolist())
        for choice in question.choices
    ]
    return _Prompt(question, "", ids, choices)


def _text_ids(model: LanguageModel, text: str) -> list[int]:
    """Returns the tokens of a text, at least one."""
    assert model.tokenizer is not None
    ids = [*model.start_ids, *model.tokenizer.encode(text).tolist()]
    # Without any token there is nothing to continue.
    return ids or list(model.end_ids[:1])


def context_and_continuation(
    model: LanguageModel, context: str, text: str
) -> tuple[list[int], list[int]]:
    """Returns the tokens of a text in two parts: those of its start, and the others.

    Spaces at the end of the context are part of the continuation, as most tokenizers put a space
    and the word after it into one token.
    """
    context = context.rstrip()
    ids = _text_ids(model, text)
    context_ids = _text_ids(model, context)
    num_context = min(len(context_ids), len(ids) - 1)
    if num_context == 0:  # neither a context nor tokens that begin a text
        return list(model.end_ids[:1]), ids
    return ids[:num_context], ids[num_context:]


# Tasks.


def windows(
    num_tokens: int, *, first: int, length: int, stride: int
) -> Iterator[tuple[int, int, int]]:
    """Yields parts of a text: the first token of a window, the first scored one, and the end.

    >>> list(windows(9, first=1, length=4, stride=2))
    [(0, 1, 4), (2, 4, 6), (4, 6, 8), (5, 8, 9)]
    """
    start = first
    while start < num_tokens:
        step = length - first if start == first else stride
        end = min(num_tokens, start + step)
        yield max(0, end - length), start, end
        start = end


def _perplexity(
    scorer: Scorer,
    rows: Sequence[_NamedRow],
    length: int | None,
    stride: int | None,
) -> EvaluationResult:
    model = scorer.model
    if length is None:
        length = scorer.max_length or _LENGTH
    if stride is None:
        stride = max(1, length // 2)
    if not 1 <= stride < length:
        raise EvaluationError(
            f"length={length} and stride={stride}; expected a stride of at least 1, and a length "
            "above it."
        )
    assert model.tokenizer is not None
    num_start = len(model.start_ids)
    first = max(1, num_start)
    if first >= length:
        raise EvaluationError(
            f"length={length}, and {num_start} tokens begin each text; expected more."
        )
    pairs: list[tuple[list[int], list[int]]] = []
    document_of_pair: list[int] = []
    num_bytes: list[int] = []
    for index, (row, name) in enumerate(rows):
        if tasks.task_of(row, name) != "perplexity":
            raise EvaluationError(
                f"{name} is not a text; all rows have to be for one task."
            )
        text = document_text(row, "text")
        num_bytes.append(len(text.encode() if isinstance(text, str) else text))
        ids = [*model.start_ids, *model.tokenizer.encode(text).tolist()]
        for begin, start, end in windows(
            len(ids), first=first, length=length, stride=stride
        ):
            pairs.append((ids[begin:start], ids[start:end]))
            document_of_pair.append(index)
    if not pairs:
        raise EvaluationError(
            "the texts have too few tokens to predict one from another."
        )
    log_probs: collections.Counter[int] = collections.Counter()
    num_tokens: collections.Counter[int] = collections.Counter()
    for index, score in zip(document_of_pair, scorer.score(pairs), strict=True):
        log_probs[index] += score.log_prob  # pyright: ignore[reportArgumentType]
        num_tokens[index] += score.num_tokens
    total = sum(log_probs.values())
    loss = -total / num_tokens.total()
    metrics = {"perplexity": _exp(loss), "loss": loss}
    if num_start > 0:
        metrics["bits_per_byte"] = -total / math.log(2) / max(1, sum(num_bytes))
    examples: list[dict[str, Any]] = []
    for index, (_, name) in enumerate(rows):
        examples.append(
            {
                "name": name,
                "log_prob": log_probs[index],
                "num_tokens": num_tokens[index],
                "num_bytes": num_bytes[index],
            }
        )
    return EvaluationResult("perplexity", metrics, {}, len(rows), examples)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _multiple_choice(
    scorer: Scorer, prompts: Sequence[_Prompt]
) -> EvaluationResult:
    pairs = [pair for prompt in prompts for pair in prompt.choices]
    scores = iter(scorer.score(pairs))
    values: dict[str, list[float]] = {"accuracy": [], "accuracy_per_byte": []}
    examples: list[dict[str, Any]] = []
    for prompt in prompts:
        question = prompt.question
        log_probs = [next(scores).log_prob for _ in question.choices]
        lengths = [len(choice.encode()) for choice in question.choices]
        right = question.choices.index(question.answers[0])
        best = int(np.argmax(log_probs))
        best_per_byte = int(np.argmax(np.divide(log_probs, lengths)))
        values["accuracy"].append(float(best == right))
        values["accuracy_per_byte"].append(float(best_per_byte == right))
        examples.append(
            {
                "name": prompt.name,
                "choice": question.choices[best],
                "answer": question.answers[0],
                "log_probs": log_probs,
            }
        )
    averages, standard_errors = means(values)
    return EvaluationResult(
        "multiple-choice", averages, standard_errors, len(prompts), examples
    )


def _exact_match(
    prompts: Sequence[_Prompt], completions: Sequence[Completion]
) -> EvaluationResult:
    matches: list[float] = []
    examples: list[dict[str, Any]] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        text = completion.text.strip()
        answers = [answer.strip() for answer in prompt.question.answers]
        matches.append(float(text in answers))
        examples.append(
            {
                "name": prompt.name,
                "completion": completion.text,
                "answer": answers[0],
                "is_right": text in answers,
            }
        )
    averages, standard_errors = means({"exact_match": matches})
    return EvaluationResult(
        "exact-match", averages, standard_errors, len(prompts), examples
    )


def _check_samples(k: Sequence[int], num_samples: int) -> None:
    if not k or min(k) < 1 or max(k) > num_samples:
        raise EvaluationError(
            f"k={list(k)} and n={num_samples}; expected numbers from 1 to n."
        )


def _pass_at_k(
    prompts: Sequence[_Prompt],
    completions: Sequence[Completion],
    checker: Checker,
    k: Sequence[int],
    num_samples: int,
) -> EvaluationResult:
    values: dict[str, list[float]] = {f"pass@{number}": [] for number in k}
    examples: list[dict[str, Any]] = []
    for index, prompt in enumerate(prompts):
        start = index * num_samples
        texts = [
            completion.text
            for completion in completions[start : start + num_samples]
        ]
        is_right = [_is_right(checker, prompt, text) for text in texts]
        for number in k:
            values[f"pass@{number}"].append(
                tasks.pass_at_k(num_samples, sum(is_right), number)
            )
        examples.append(
            {"name": prompt.name, "completions": texts, "is_right": is_right}
        )
    averages, standard_errors = means(values)
    return EvaluationResult(
        "pass@k", averages, standard_errors, len(prompts), examples
    )


def _is_right(checker: Checker, prompt: _Prompt, text: str) -> bool:
    row: Mapping[str, Any] = dict(prompt.question.row)
    try:
        return bool(checker(row, text))
    except Exception as error:
        raise EvaluationError(
            f"the checker raised {type(error).__name__} for {prompt.name}: {error}. It is called "
            "with the row, a dict, and a completion, a string."
        ) from error
