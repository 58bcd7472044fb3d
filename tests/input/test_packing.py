import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import EmptyCorpusError
from weft.input.packing import PackedSequences, token_stream

EOS, PAD = 8, 9

documents = st.lists(st.lists(st.integers(0, 7), max_size=12), min_size=1, max_size=6)


def pack(docs, length, **kwargs):
    stream = token_stream([np.array(d, np.int32) for d in docs], eos_id=EOS)
    return PackedSequences(stream, sequence_length=length, eos_id=EOS, pad_id=PAD, **kwargs)


def reference(docs):
    """Returns (input, target, document, position in it) for every target of the stream."""
    rows = []
    for d, doc in enumerate(docs):
        tokens = [EOS, *doc]
        rows += [(t, n, d, i) for i, (t, n) in enumerate(zip(tokens, [*doc, EOS], strict=True))]
    return rows


@settings(deadline=None, max_examples=25)
@given(documents, st.integers(1, 9))
def test_every_token_is_a_target_exactly_once(docs, length):
    source = pack(docs, length)
    examples = [source[i] for i in range(len(source))]
    inputs = np.concatenate([e["input_ids"] for e in examples])
    targets = np.concatenate([e["target_labels"] for e in examples])
    live = targets != PAD
    assert [(i, t) for i, t, _, _ in reference(docs)] == list(
        zip(inputs[live], targets[live], strict=True)
    )
    assert (inputs[~live] == PAD).all()
    assert (~live).sum() < length
    assert sum(int(e["target_num_bytes"]) for e in examples) == sum(map(len, docs))
    np.testing.assert_array_equal(np.concatenate([e["live_targets"] for e in examples]), live)
    assert all(
        e[k].dtype == (bool if k == "live_targets" else np.int32) for e in examples for k in e
    )


@settings(deadline=None, max_examples=25)
@given(documents, st.integers(1, 9))
def test_segments_never_join_two_documents(docs, length):
    source = pack(docs, length, segments=True)
    rows = reference(docs)
    for i in range(len(source)):
        example = source[i]
        mine = rows[i * length : (i + 1) * length]
        segment, position = example["input_segment_ids"], example["input_positions"]
        assert (segment.dtype, position.dtype) == (np.int32, np.int32)
        assert (segment[len(mine) :] == 0).all()
        assert (position[len(mine) :] == 0).all()
        found = [(int(segment[j]), mine[j][2]) for j in range(len(mine))]
        assert found[0][0] == 1
        # One segment per document, in order; positions count from its first token here.
        assert len(set(found)) == len({s for s, _ in found}) == len({d for _, d in found})
        first = {}
        for j, (s, _) in enumerate(found):
            assert position[j] == j - first.setdefault(s, j)


@settings(deadline=None, max_examples=25)
@given(documents, st.integers(1, 9), st.integers(1, 5))
def test_dropping_and_padding_change_only_the_end(docs, length, multiple):
    full = pack(docs, length)
    padded = pack(docs, length, pad_to_multiple_of=multiple)
    assert len(padded) % multiple == 0
    assert 0 <= len(padded) - len(full) < multiple
    for i in range(len(full)):
        np.testing.assert_array_equal(padded[i]["target_labels"], full[i]["target_labels"])
    for i in range(len(full), len(padded)):
        assert (padded[i]["input_ids"] == PAD).all()
        assert (padded[i]["target_labels"] == PAD).all()
        assert padded[i]["target_num_bytes"] == 0
    num_targets = len(reference(docs))
    if num_targets >= length:
        dropped = pack(docs, length, drop_remainder=True)
        assert len(dropped) == num_targets // length
        assert all((dropped[i]["target_labels"] != PAD).all() for i in range(len(dropped)))


@settings(deadline=None, max_examples=25)
@given(documents, st.integers(1, 9), st.data())
def test_strided_sequences_have_each_target_once(docs, length, data):
    stride = data.draw(st.integers(1, length))
    source = pack(docs, length, stride=stride)
    rows = reference(docs)
    found = []
    for i in range(len(source)):
        example, mine = source[i], rows[i * stride :][:length]
        assert example["input_ids"][: len(mine)].tolist() == [row[0] for row in mine]
        assert (example["input_ids"][len(mine) :] == PAD).all()
        new = example["target_labels"] != PAD
        assert i == 0 or not new[: length - stride].any()
        found += example["target_labels"][new].tolist()
    assert found == [row[1] for row in rows]
    if len(rows) >= length:
        dropped = pack(docs, length, stride=stride, drop_remainder=True)
        assert len(dropped) == (len(rows) - length) // stride + 1


def test_max_examples_are_spread_over_the_stream():
    docs = [[i % 8] * 9 for i in range(40)]
    full, some = pack(docs, 10), pack(docs, 10, max_examples=4)
    assert len(full) == 40
    assert [some[i]["target_labels"][0] for i in range(4)] == [
        full[i]["target_labels"][0] for i in (0, 10, 20, 30)
    ]
    assert len(pack(docs, 10, max_examples=1000)) == 40


def test_too_little_text_reports_its_size():
    with pytest.raises(EmptyCorpusError, match=r"4 tokens do not fill one sequence of 5; add text"):
        pack([[1, 2, 3]], 5, drop_remainder=True)


@settings(deadline=None, max_examples=25)
@given(documents, st.integers(1, 9), st.integers(1, 9))
def test_padding_with_the_end_of_a_text_changes_nothing_else(docs, length, stride):
    options = {"stride": min(stride, length), "segments": True}
    stream = token_stream([np.array(d, np.int32) for d in docs], eos_id=EOS)
    kwargs = {"sequence_length": length, "eos_id": EOS, **options}
    same = PackedSequences(stream, pad_id=EOS, **kwargs)
    other = PackedSequences(stream, pad_id=PAD, **kwargs)
    for i in range(len(other)):
        ours, want = same[i], other[i]
        for name in ("input_ids", "target_labels"):
            np.testing.assert_array_equal(ours[name], np.where(want[name] == PAD, EOS, want[name]))
        for name in ("live_targets", "target_num_bytes", "input_segment_ids", "input_positions"):
            np.testing.assert_array_equal(ours[name], want[name])
        np.testing.assert_array_equal(ours["live_targets"], want["target_labels"] != PAD)


def test_out_of_range_index_fails():
    source = pack([[1, 2, 3]], 2)
    with pytest.raises(IndexError, match=r"examples \[2\] of 2"):
        source[2]
