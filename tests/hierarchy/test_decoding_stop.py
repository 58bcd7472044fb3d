import jax.numpy as jnp
import pytest

from weft.errors import ArgumentValueError
from weft.hierarchy.decoding import (
    CompositeDecodingCondition,
    StopOnMaxLength,
    StopOnSubsequence,
)

SEQUENCE = [1, 3, 4, 2, 3, 4, 0]


def stops(condition, prefix_len=0):
    sequences = jnp.array([[SEQUENCE]])
    return [
        i
        for i in range(len(SEQUENCE))
        if condition(index=jnp.array([i]), sequences=sequences, prefix_len=jnp.array([prefix_len]))
    ]


@pytest.mark.parametrize(
    "stopping_seqs, expected",
    [
        (4, [2, 5]),
        ([4], [2, 5]),
        ([3, 4], [2, 5]),
        ([[3, 4], [2]], [2, 3, 5]),
        ([[4, 2, 3]], [4]),
        ([[1]], [0]),
        ([[0, 1]], []),
    ],
)
def test_a_sequence_ends_where_a_stopping_sequence_does(stopping_seqs, expected):
    assert stops(StopOnSubsequence(stopping_seqs)) == expected


def test_the_prompt_is_no_part_of_a_match():
    assert stops(StopOnSubsequence([3, 4]), prefix_len=1) == [2, 5]
    assert stops(StopOnSubsequence([3, 4]), prefix_len=2) == [5]
    assert stops(StopOnSubsequence([3, 4]), prefix_len=5) == []


def test_prompts_have_positions_and_lengths_of_their_own():
    sequences = jnp.array([[[1, 5, 7], [1, 7, 5]], [[1, 5, 7], [1, 7, 5]]])
    stop = StopOnSubsequence(7)(
        index=jnp.array([1, 2]), sequences=sequences, prefix_len=jnp.array([1, 1])
    )
    assert stop.tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("stopping_seqs", [[], [[]], [[3], []]])
def test_empty_stopping_sequences_are_refused(stopping_seqs):
    with pytest.raises(ArgumentValueError, match=r"has an empty sequence; expected token ids"):
        StopOnSubsequence(stopping_seqs)


def test_max_length_counts_decoded_tokens():
    assert stops(StopOnMaxLength(2), prefix_len=3) == [4, 5, 6]
    assert stops(StopOnMaxLength(1), prefix_len=3) == [3, 4, 5, 6]


def test_max_length_may_differ_between_prompts():
    sequences = jnp.ones((2, 3, 9), int)
    stop = StopOnMaxLength(jnp.array([2, 3]))(
        index=jnp.array([4, 4]), sequences=sequences, prefix_len=jnp.array([3, 3])
    )
    assert stop.tolist() == [[True] * 3, [False] * 3]


def test_a_composite_stops_when_any_part_does():
    both = CompositeDecodingCondition([StopOnSubsequence(2), StopOnMaxLength(5)])
    assert stops(both, prefix_len=1) == [3, 5, 6]


def test_a_composite_of_nothing_is_refused():
    with pytest.raises(ArgumentValueError, match="conditions is empty"):
        CompositeDecodingCondition([])
