import json

import numpy as np
import pytest

from weft.errors import EmptyCorpusError, InputDatasetError
from weft.input.grain import DispatchConfig
from weft.input.packing import PackedSequences, token_stream
from weft.input.sequences import sequence_batches

EOS, PAD, LENGTH = 900, 901, 4


def sequences(first, n):
    """`n` sequences whose first token tells which they are."""
    documents = [np.full(LENGTH - 1, first + i) for i in range(n)]
    stream = token_stream(documents, eos_id=EOS)
    return PackedSequences(stream, sequence_length=LENGTH, eos_id=EOS, pad_id=PAD)


SOURCES = [sequences(0, 12), sequences(100, 12), sequences(200, 20)]


def make(sources=SOURCES, **kwargs):
    kwargs = {"global_batch_size": 8, "is_training": True, "seed": 3} | kwargs
    return sequence_batches(sources, **kwargs)


def names(batch):
    return batch["input_ids"][:, 1].tolist()


def take(it, n):
    return [names(next(it)) for _ in range(n)]


def flat(lists):
    return [name for one in lists for name in one]


def open_(source, index=0, num=1):
    return iter(source(DispatchConfig(index, num)))


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 4.0]], ids=["sizes", "weights"])
def test_one_two_and_again_one_process_see_the_same_global_batches(weights):
    source = make(weights=weights)
    want = take(open_(source), 12)
    one = open_(source)
    seen = take(one, 4)
    state = json.loads(json.dumps(one.get_state()))
    two = [open_(source, i, 2) for i in range(2)]
    for it in two:
        it.set_state(state)
    seen += [a + b for a, b in zip(*(take(it, 4) for it in two), strict=True)]
    states = [it.get_state() for it in two]
    assert states[0] == states[1] == {"next_index": 8}
    again = open_(source)
    again.set_state(states[1])
    assert seen + take(again, 4) == want


def test_a_mixture_keeps_its_proportions_and_each_source_its_passes():
    rows = flat(take(open_(make(weights=[1.0, 1.0, 2.0])), 24))
    by_source = [[r for r in rows if r // 100 == i] for i in range(3)]
    assert [len(part) for part in by_source] == [48, 48, 96]
    for part, source in zip(by_source, SOURCES, strict=True):
        n = len(source)
        passes = [part[i : i + n] for i in range(0, len(part) - n + 1, n)]
        assert all(len(set(one)) == n for one in passes)
        assert passes[0] != passes[1]
    # Sources of equal size are shuffled differently.
    assert by_source[0][:12] != [r - 100 for r in by_source[1][:12]]


def test_without_weights_all_come_equally_often():
    rows = flat(take(open_(make(global_batch_size=4)), 11))
    assert len(set(rows)) == 44


def test_evaluation_has_all_once_in_order():
    source = make(global_batch_size=4, is_training=False)
    rows = flat(names(batch) for batch in open_(source))
    assert rows == [*range(12), *range(100, 112), *range(200, 220)]


def test_rows_of_a_mixture_are_those_of_their_sources():
    batch = next(open_(make(weights=[1.0, 1.0, 1.0])))
    for row, name in enumerate(names(batch)):
        example = SOURCES[name // 100][name % 100]
        for key, value in example.items():
            np.testing.assert_array_equal(batch[key][row], value)


def test_weights_that_do_not_fit():
    with pytest.raises(InputDatasetError, match=r"3 sources cannot be mixed with weights=\[1\.0\]"):
        make(weights=[1.0])
    with pytest.raises(InputDatasetError, match=r"weights=\[1\.0, 0\.0, 1\.0\]; pass one positive"):
        open_(make(weights=[1.0, 0.0, 1.0]))


def test_not_one_batch():
    with pytest.raises(
        EmptyCorpusError, match=r"^notes has 44 sequences of 4 tokens, fewer than one batch of 45"
    ):
        make(global_batch_size=45, name="notes")
