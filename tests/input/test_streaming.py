import json

import grain
import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import EmptyCorpusError, InputDatasetError, InputReadError
from weft.input.files import json_lines_dataset
from weft.input.grain import DispatchConfig
from weft.input.streaming import lm_stream_source

TEXTS = ["abcdefghij"[: 1 + i % 10] * (1 + i % 3) for i in range(37)]
DOCUMENTS = grain.MapDataset.source([{"text": text} for text in TEXTS])
EOS, PAD = 256, 257


def make(**kwargs):
    defaults = {"documents": DOCUMENTS, "sequence_length": 32, "global_batch_size": 4}
    return lm_stream_source(**(defaults | {"is_training": True} | kwargs))


def batches(source, n=None, index=0, num=1, state=None):
    it = iter(source(DispatchConfig(index, num)))
    if state is not None:
        it.set_state(json.loads(json.dumps(state)))
    found = []
    while n is None or len(found) < n:
        batch = next(it, None)
        if batch is None:
            break
        found.append(batch)
    state = it.get_state()
    it.close()
    return found, state


def documents_of(found):
    """The documents as the targets show them, those that were cut in their pieces."""
    texts = []
    for batch in found:
        for inputs, targets, segments in zip(
            batch["input_ids"], batch["target_labels"], batch["input_segment_ids"], strict=True
        ):
            for segment in range(1, segments.max() + 1):
                here = segments == segment
                # Inputs are the targets one step earlier.
                assert (inputs[here][1:] == targets[here][:-1]).all()
                texts.append(bytes(t for t in targets[here].tolist() if t < EOS).decode())
    return texts


@pytest.mark.parametrize("split_documents", [True, False], ids=["cut", "whole"])
def test_evaluation_has_each_document_once(split_documents):
    found, _ = batches(make(is_training=False, split_documents=split_documents))
    texts = documents_of(found)
    assert "".join(texts) == "".join(TEXTS) if split_documents else sorted(texts) == sorted(TEXTS)
    assert sum(int(b["target_num_bytes"].sum()) for b in found) == sum(map(len, TEXTS))
    last = {name: values[-1] for name, values in found[-1].items()}
    assert (last["input_ids"] == PAD).all()
    assert (last["target_labels"] == PAD).all()
    assert not last["input_segment_ids"].any()
    shapes = {name: (v.shape, v.dtype) for name, v in found[0].items()}
    assert shapes == {
        "input_ids": ((4, 32), np.int32),
        "target_labels": ((4, 32), np.int32),
        "target_num_bytes": ((4,), np.int32),
        "input_segment_ids": ((4, 32), np.int32),
        "input_positions": ((4, 32), np.int32),
    }


@pytest.mark.parametrize("split_documents", [True, False], ids=["cut", "whole"])
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
def test_one_two_and_again_one_process_see_the_same_batches(split_documents, is_training):
    source = make(split_documents=split_documents, is_training=is_training)
    want, end = batches(source, 4)
    first, state = batches(source, 1)
    halves = [batches(source, 2, index=i, num=2, state=state) for i in range(2)]
    assert halves[0][1] == halves[1][1]
    middle = [
        {name: np.concatenate([a[name], b[name]]) for name in a}
        for a, b in zip(halves[0][0], halves[1][0], strict=True)
    ]
    last, state = batches(source, 1, state=halves[0][1])
    for got, expected in zip(first + middle + last, want, strict=True):
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name])
    assert state == end
    # Its size does not grow.
    assert len(json.dumps(state)) < 250


def test_training_has_another_order_in_each_pass_and_with_each_seed():
    found = [documents_of(batches(make(split_documents=False, seed=s), 9)[0]) for s in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert len(found[0]) > len(TEXTS)


def test_a_mixture_by_weights():
    a, b = ([{"text": letter * 7}] * 5 for letter in "ab")
    named = {"a": grain.MapDataset.source(a), "b": grain.MapDataset.source(b)}
    source = make(documents=named, weights={"a": 3.0, "b": 1.0}, split_documents=False)
    texts = documents_of(batches(source, 5)[0])
    assert texts.count("a" * 7) == 3 * texts.count("b" * 7) == 60
    with pytest.raises(
        InputDatasetError, match=r"given for \['a'\], .* are \['a', 'b'\]; pass one"
    ):
        make(documents=named, weights={"a": 1.0})


def test_errors_name_the_document(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": "' + "x" * 31 + '"}\n{"words": 1}\n')
    documents = config_for_function(json_lines_dataset).set(paths=str(path))
    source = make(documents=documents, split_documents=False, is_training=False)
    with pytest.raises(InputReadError, match=r"line 2 of .*has 32 tokens .* sequence_length=31; l"):
        batches(make(documents=documents, sequence_length=31, split_documents=False))
    with pytest.raises(InputReadError, match=r"line 3 of \S+a\.jsonl: the record has no 'text'"):
        batches(source)


def test_no_documents():
    with pytest.raises(EmptyCorpusError, match=r"^documents has no documents; pass files"):
        make(documents=grain.MapDataset.source([]))
