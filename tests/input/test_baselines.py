import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import EmptyCorpusError
from weft.input.baselines import ngram_baselines, ngram_nats
from weft.input.corpus import Corpus, TextFile, stdlib_corpus


def by_hand(train, held_out, vocab_size, order):
    """The defining recursion, one token at a time."""
    train = [train[0], *train]
    held_out = [held_out[0], *held_out]

    def count(gram):
        n = len(gram)
        return sum(train[i : i + n] == gram for i in range(len(train) - n + 1))

    def probability(context, token):
        if context is None:
            return 1 / vocab_size
        after = [count([*context, c]) for c in range(vocab_size)]
        total, kinds = sum(after), sum(a > 0 for a in after)
        shorter = probability(context[1:] if context else None, token)
        return (after[token] + kinds * shorter) / (total + kinds) if total else shorter

    return -sum(
        math.log(probability(held_out[i - order + 1 : i], held_out[i]))
        for i in range(2, len(held_out))
    )


tokens = st.lists(st.integers(0, 3), min_size=2, max_size=25)


@settings(deadline=None, max_examples=25)
@given(tokens, tokens)
def test_cross_entropies_follow_the_formula(train, held_out):
    nats = ngram_nats(np.array(train), np.array(held_out), vocab_size=4)
    for order in (1, 2, 3):
        assert nats[order] == pytest.approx(by_hand(train, held_out, 4, order), rel=1e-12)


def test_an_unseen_alphabet_costs_the_uniform_distribution():
    nats = ngram_nats(np.zeros(50, int), np.full(11, 3), vocab_size=4)
    # A trigram ending in 3 was never seen; of its contexts only the empty one was.
    assert nats[2] == nats[3] == nats[1]
    assert nats[1] == pytest.approx(10 * math.log(4 * (51 + 1)))


def test_standard_library_baselines_are_those_of_real_text():
    result = ngram_baselines(stdlib_corpus())
    nats = [result[name].nats_per_token for name in ("unigram", "bigram", "trigram")]
    # It differs by Python version; random bytes would be at 5.5.
    assert nats == pytest.approx([3.24, 2.41, 1.74], abs=0.1)
    for baseline in result.values():
        assert baseline.bits_per_byte == pytest.approx(
            baseline.nats_per_token / math.log(2), rel=1e-3
        )
    assert result["trigram"].order == 3
    assert result["trigram"].name == "trigram"


def test_ends_of_files_cost_nats_but_are_no_bytes():
    # Files 1 and 2 are held out.
    files = tuple(TextFile(f"{i}.py", b"ab" * 5) for i in range(8))
    result = ngram_baselines(Corpus("small", files))
    targets, num_bytes = 2 * 11, 2 * 10
    for baseline in result.values():
        nats = baseline.bits_per_byte * math.log(2) * num_bytes
        assert nats == pytest.approx(baseline.nats_per_token * targets)


def test_counting_can_be_cut():
    corpus = stdlib_corpus(pattern="[a-d]*.py")
    full, cut = ngram_baselines(corpus), ngram_baselines(corpus, max_train_bytes=2000)
    assert cut["trigram"].nats_per_token > full["trigram"].nats_per_token


def test_nothing_held_out_is_an_error():
    with pytest.raises(EmptyCorpusError, match="'held_out'"):
        ngram_baselines(Corpus("one", (TextFile("3.py", b"text"),)))
