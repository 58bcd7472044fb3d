"""Cross-entropies of unigram, bigram and trigram models, as baselines.

Each order falls back on the next lower one with the smoothing of Witten and Bell (1991, "The
zero-frequency problem"), which has no hyperparameters. With N(h) the occurrences of a context h and
T(h) the number of distinct tokens after it,

    p(c | h) = (N(h c) + T(h) p(c | shorter h)) / (N(h) + T(h))

The unigram falls back on the uniform distribution.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from weft.input.corpus import Corpus, Split
from weft.input.packing import token_stream
from weft.input.tokenizer import ByteTokenizer

NAMES = {1: "unigram", 2: "bigram", 3: "trigram"}


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Held-out losses of one n-gram order.

    Attributes:
        order: 1, 2 or 3.
        nats_per_token: Mean cross-entropy over the targets, including ends of files, comparable to
            a model's loss.
        bits_per_byte: The total, per byte of text.
    """

    order: int
    nats_per_token: float
    bits_per_byte: float

    @property
    def name(self) -> str:
        return NAMES[self.order]


def ngram_baselines(corpus: Corpus, *, max_train_bytes: int = 32_000_000) -> Mapping[str, Baseline]:
    """Computes the baselines "unigram", "bigram" and "trigram" on the held-out part of a corpus.

    Args:
        corpus: Tokens are bytes; files are separated by an end token, as in packed sequences.
        max_train_bytes: Maximum number of training bytes to count, which suffice for trigrams of
            bytes.

    Raises:
        EmptyCorpusError: If a part of the corpus has no file.

    >>> from weft.input.corpus import stdlib_corpus
    >>> result = ngram_baselines(stdlib_corpus(pattern="asyncio/*.py"))
    >>> [name for name, b in result.items() if b.bits_per_byte < 8]
    ['unigram', 'bigram', 'trigram']
    """
    train = _stream(corpus, "train")[: max_train_bytes + 1]
    held_out = _stream(corpus, "held_out")
    num_tokens, num_bytes = len(held_out) - 1, corpus.num_bytes("held_out")
    nats = ngram_nats(train, held_out, vocab_size=ByteTokenizer.eos_id + 1)
    return {
        NAMES[order]: Baseline(
            order=order,
            nats_per_token=total / num_tokens,
            bits_per_byte=total / num_bytes / math.log(2),
        )
        for order, total in nats.items()
    }


def ngram_nats(train: np.ndarray, held_out: np.ndarray, *, vocab_size: int) -> dict[int, float]:
    """Computes the total cross-entropy, in nats, of all held-out tokens but the first, by order.

    Args:
        train: `Int[np.ndarray, "train"]`, ids below `vocab_size`.
        held_out: `Int[np.ndarray, "held_out"]`.
        vocab_size: Size of the alphabet. Memory is `8 * vocab_size**3` bytes.
    """
    # A duplicate of the first token gives every target two tokens of context.
    seen = np.concatenate([train[:1], train]).astype(np.int32)
    asked = np.concatenate([held_out[:1], held_out]).astype(np.int32)
    keys, key_counts = np.unique(_ngrams(asked, 3, vocab_size), return_counts=True)
    probability = np.full(len(keys), 1 / vocab_size)
    nats = {}
    for order in NAMES:
        contexts = vocab_size ** (order - 1)
        counts = np.bincount(_ngrams(seen, order, vocab_size), minlength=contexts * vocab_size)
        by_context = counts.reshape(contexts, vocab_size)
        totals = by_context.sum(axis=1)
        kinds = np.bincount(np.flatnonzero(counts) // vocab_size, minlength=contexts)
        key = keys % vocab_size**order
        context = key // vocab_size
        n, t = totals[context], kinds[context]
        smoothed = (counts[key] + t * probability) / np.maximum(n + t, 1)
        # For an unseen context, use the shorter one.
        probability = np.where(n > 0, smoothed, probability)
        nats[order] = float(-np.sum(key_counts * np.log(probability)))
    return nats


def _stream(corpus: Corpus, split: Split) -> np.ndarray:
    tokenizer = ByteTokenizer()
    documents = (tokenizer.encode(file.text) for file in corpus.split(split))
    return token_stream(documents, eos_id=tokenizer.eos_id)


def _ngrams(tokens: np.ndarray, order: int, vocab_size: int) -> np.ndarray:
    """Encodes each n-gram as one number, the last token least significant."""
    key = tokens[: len(tokens) - order + 1]
    for offset in range(1, order):
        key = key * vocab_size + tokens[offset : len(tokens) - order + 1 + offset]
    return key
