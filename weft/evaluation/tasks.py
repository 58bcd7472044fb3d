"""Rows of data as questions to a language model, and how its answers are judged.

    {"text": …}                                  perplexity
    {"prompt": …, "choices": […], "answer": …}   multiple choice
    {"prompt": …, "answer": …}                   exact match
    {"prompt": …} and a function that checks     pass@k

`question` is another name of `prompt`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from weft.errors import EvaluationError

Row = Mapping[str, Any]


class Question(NamedTuple):
    """A row of data with an answer.

    Attributes:
        prompt: text before the answer.
        choices: texts to choose from; empty for an answer in the model's own words.
        answers: right answers, at least one; of several choices, one of them.
        row: what it was read from.
    """

    prompt: str
    choices: Sequence[str]
    answers: Sequence[str]
    row: Row


def task_of(row: object, name: str) -> str:
    """Returns the task that a row of data is for, by its fields.

    Args:
        name: of the row, for messages.

    Raises EvaluationError if the fields are those of no task.
    """
    if not isinstance(row, Mapping):
        raise EvaluationError(
            f"{name} is of type {type(row).__name__}; {_EXPECTED}"
        )
    if row.get("choices") is not None:
        return "multiple-choice"
    if row.get("answer") is not None:
        return "exact-match"
    if row.get("text") is not None:
        return "perplexity"
    raise EvaluationError(
        f"{name} has the fields {sorted(map(str, row))}; {_EXPECTED}"
    )


_EXPECTED = (
    "expected `text`; `prompt` with `answer`, and `choices` if there are some; or `prompt` alone "
    "with a checker"
)


def question_of(row: object, name: str, task: str) -> Question:
    """Returns the question of a row.

    Raises EvaluationError if a field is missing or of the wrong type.
    """
    if not isinstance(row, Mapping):
        raise EvaluationError(
            f"{name} is of type {type(row).__name__}; {_EXPECTED}"
        )
    prompt = row.get("prompt")
    if prompt is None:
        prompt = row.get("question")
    if not isinstance(prompt, str):
        raise EvaluationError(
            f"{name} has the fields {sorted(map(str, row))}; expected a text `prompt` or "
            "`question`"
        )
    if task == "pass@k":
        return Question(prompt, (), (), row)
    answer = row.get("answer")
    if task == "exact-match":
        answers = [answer] if isinstance(answer, str) else answer
        if not _are_texts(answers):
            raise EvaluationError(
                f"`answer` of {name} is {answer!r:.80}; expected a text, or a list of texts "
                "that are right"
            )
        return Question(prompt, (), list(answers), row)
    choices = row.get("choices")
    if not _are_texts(choices) or len(choices) < 2 or "" in choices:
        raise EvaluationError(
            f"`choices` of {name} are {choices!r:.80}; expected a list of two texts, or more"
        )
    return Question(
        prompt, list(choices), [_right_choice(answer, choices, name)], row
    )


def _are_texts(value: object) -> TypeGuard[Sequence[str]]:
    if not isinstance(value, list | tuple) or len(value) == 0:
        return False
    return all(isinstance(text, str) for text in value)


def _right_choice(answer: object, choices: Sequence[str], name: str) -> str:
    """Returns the choice that an answer names by its index, its letter or its text."""
    if isinstance(answer, str):
        if answer in choices:
            return answer
        letters = [chr(ord("A") + i) for i in range(len(choices))]
        if answer in letters:
            return choices[letters.index(answer)]
    elif type(answer) is int and 0 <= answer < len(choices):
        return choices[answer]
    raise EvaluationError(
        f"`answer` of {name} is {answer!r:.80}; expected one of its {len(choices)} choices: "
        "the text, its index from 0, or its letter from A"
    )


def with_examples(
    question: Question, examples: Sequence[Question], separator: str = "\n\n"
) -> str:
    r"""Returns the prompt of a question after solved ones.

    >>> solved = Question("1 + 1 =", (), ["2"], {})
    >>> with_examples(Question("2 + 2 =", (), ["4"], {}), [solved])
    '1 + 1 = 2\n\n2 + 2 ='
    """
    parts: list[str] = []
    for example in examples:
        parts.append(joined(example.prompt, example.answers[0]) + separator)
    return "".join([*parts, question.prompt])


def joined(prompt: str, answer: str) -> str:
    """Returns a prompt and an answer with a space between them, if neither has one.

    >>> joined("1 + 1 =", "2"), joined("Why? ", "So.")
    ('1 + 1 = 2', 'Why? So.')
    """
    if not prompt or prompt[-1].isspace() or answer[:1].isspace():
        return prompt + answer
    return f"{prompt} {answer}"


def examples_for(
    index: int, examples: Sequence[Question], *, shots: int, seed: int
) -> list[Question]:
    """Returns solved questions to show before one, drawn without replacement.

    Args:
        index: the place of the question among the examples, which is never drawn; -1 if it is not
            one of them.
    """
    others = [i for i in range(len(examples)) if i != index]
    order = np.random.default_rng([seed, index + 1]).permutation(len(others))
    return [examples[others[i]] for i in order[:shots]]


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Returns the probability that one of `k` samples is right, without bias.

    This is `1 - C(n - c, k) / C(n, k)` for c of n samples that are right (Chen et al., 2021,
    "Evaluating Large Language Models Trained on Code", equation 1).

    >>> pass_at_k(num_samples=4, num_right=1, k=1), pass_at_k(num_samples=4, num_right=1, k=4)
    (0.25, 1.0)
    """
    num_wrong = num_samples - num_right
    return 1.0 - math.comb(num_wrong, k) / math.comb(num_samples, k)
