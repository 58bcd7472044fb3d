"""Training on text that is packed while it is read, by one process or by several."""

import json
import random

import grain
import jax
import numpy as np
import pytest

from weft.errors import InputDatasetError
from weft.input.grain import DispatchConfig, Input
from weft.input.prefetch import PARTS
from weft.input.text import lm_stream_source
from weft.input.tokenizers import ByteTokenizer
from weft.trainer.checkpointer.host_state import (
    maybe_restore_python_savables,
    maybe_save_python_savables,
)

EOS = ByteTokenizer.eos_id
NUM_ROWS = 12


def texts(number, letters="abcdefghij"):
    rng = random.Random(0)
    return [f"{i}:{''.join(rng.choices(letters, k=rng.randint(1, 25)))}" for i in range(number)]


def records(values):
    return grain.MapDataset.source([{"text": text} for text in values])


def make(documents=None, **kwargs):
    defaults = {
        "documents": documents or records(texts(200)),
        "sequence_length": 32,
        "global_batch_size": NUM_ROWS,
        "is_training": True,
    }
    return lm_stream_source(**(defaults | kwargs))


def documents_of(rows):
    """Returns the whole documents of the targets of one row in several batches, in order."""
    joined = np.concatenate([row[row <= EOS] for row in rows])
    pieces = "".join(chr(t) if t < EOS else "\n" for t in joined.tolist()).split("\n")
    return [piece for piece in pieces[:-1] if piece]


class Processes:
    """The processes of a run, one after the other in this one."""

    def __init__(self, source, count):
        self._count = count
        self._iterators = [iter(source(DispatchConfig(i, count))) for i in range(count)]

    def batches(self, number):
        found = []
        for _ in range(number):
            parts = [next(iterator) for iterator in self._iterators]
            found.append({k: np.concatenate([part[k] for part in parts]) for k in parts[0]})
        return found

    def _each(self, monkeypatch):
        monkeypatch.setattr(jax, "process_count", lambda: self._count)
        for index, iterator in enumerate(self._iterators):
            monkeypatch.setattr(jax, "process_index", lambda index=index: index)
            yield {"batches": iterator}

    def save(self, directory, monkeypatch):
        for values in self._each(monkeypatch):
            maybe_save_python_savables(values, dir=str(directory))

    def restore(self, directory, monkeypatch):
        for values in self._each(monkeypatch):
            maybe_restore_python_savables(values, dir=str(directory))


def assert_equal_batches(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        for name in other:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("split_documents", [True, False], ids=["cut", "whole"])
def test_a_run_of_four_continues_with_three_and_with_one(tmp_path, monkeypatch, split_documents):
    source = make(split_documents=split_documents)
    want = Processes(source, 1).batches(9)
    found = []
    before = None
    for count in (4, 3, 1):
        processes = Processes(source, count)
        if before is not None:
            processes.restore(before, monkeypatch)
        found += processes.batches(3)
        before = tmp_path / str(count)
        processes.save(before, monkeypatch)
    assert_equal_batches(found, want)
    # With as many processes as before, each reads its own file.
    again = Processes(source, 3)
    again.restore(tmp_path / "3", monkeypatch)
    assert_equal_batches(again.batches(3), want[6:])


@pytest.mark.parametrize("split_documents", [True, False], ids=["cut", "whole"])
def test_a_process_tokenizes_its_share(split_documents):
    class Counting(ByteTokenizer):
        def encode(self, text):
            counts[-1] += 1
            return super().encode(text)

    counts = []
    num_rows = 64
    for num_processes in (1, 4):
        counts.append(0)
        source = make(
            tokenizer=Counting(), split_documents=split_documents, global_batch_size=num_rows
        )
        process = iter(source(DispatchConfig(1 % num_processes, num_processes)))
        for _ in range(20):
            next(process)
        process.close()
    assert counts[1] == pytest.approx(counts[0] / 4, rel=0.1)


def test_each_document_comes_once_in_a_pass():
    all_texts = texts(30 * NUM_ROWS)
    batches = Processes(make(records(all_texts)), 1).batches(30)
    first_pass = []
    for row in range(NUM_ROWS):
        of_row = documents_of([batch["target_labels"][row] for batch in batches])
        assert len(of_row) > 30
        first_pass += of_row[:30]
    assert sorted(first_pass) == sorted(all_texts)
    assert first_pass != all_texts


def test_every_row_reads_every_dataset_of_a_mixture():
    documents = {"a": records(texts(50, "a")), "b": records(texts(50, "b"))}
    batches = Processes(make(documents, weights={"a": 3.0, "b": 1.0}), 1).batches(60)
    total = 0
    for row in range(NUM_ROWS):
        of_row = documents_of([batch["target_labels"][row] for batch in batches])
        share = np.mean(["a" in text for text in of_row])
        assert 0.5 < share < 0.95
        total += share / NUM_ROWS
    assert total == pytest.approx(0.75, abs=0.05)


def test_features_are_those_of_documents_packed_in_order():
    """An evaluation packs all rows in order; its features are those of training."""
    document = [{"text": "abcdefg"}, {"text": "hi"}]
    options = {"sequence_length": 10, "global_batch_size": 1}
    (trained,) = Processes(make(grain.MapDataset.source(document[:1]), **options), 1).batches(1)
    evaluated = next(
        iter(
            make(grain.MapDataset.source(document[:1] * 2), **options, is_training=False)(
                DispatchConfig(0, 1)
            )
        )
    )
    assert trained.keys() == evaluated.keys()
    for name, values in evaluated.items():
        np.testing.assert_array_equal(trained[name], values)
        assert trained[name].dtype == values.dtype


def test_documents_that_are_filtered_out_are_skipped():
    documents = records(texts(20) + ["no"] * 20).filter(lambda record: record["text"] != "no")
    for split_documents in (True, False):
        source = make(documents, split_documents=split_documents, weights={"documents": 1.0})
        (batch,) = Processes(source, 1).batches(1)
        assert batch["input_segment_ids"].max(initial=0) > 0
        for row in batch["input_segment_ids"]:
            segments = row[row > 0]
            assert set(np.diff(segments).tolist()) <= {0, 1}


def test_a_document_that_cannot_be_read_leaves_the_position():
    values = texts(40)
    values[17] = 17
    process = iter(make(records(values), split_documents=False)(DispatchConfig(0, 1)))
    states = [process.get_state()]
    with pytest.raises(InputDatasetError, match="expected a string"):
        for _ in range(40):
            next(process)
            states.append(process.get_state())
    assert process.get_state() == states[-1]


# What two batches of Weft 0.2 left, and the rows that followed.
EARLIER = [
    (
        True,
        {
            "parent_state": {"next_index": 12},
            "remainder_slices": {"pairs": [1, 18]},
            "elements_from_buffer_after_checkpoint": 1,
        },
        ["iiiii.llllllllllllll.kkk", "kkkkkkkkkk.", "ggggggggg.bbbb.mmmmmmmmm", "mmmmmm."],
    ),
    (
        False,
        {"parent": {"next_index": 12}, "next_row": 0, "counter": 8},
        [".ooooooooooooooooo", ".iiiiiiiiiii", ".llllllllllllll", ".kkkkkkkkkkkkk"],
    ),
]


@pytest.mark.parametrize(("split_documents", "state", "want"), EARLIER, ids=["cut", "whole"])
def test_positions_of_earlier_versions_continue_in_their_order(split_documents, state, want):
    documents = records(chr(97 + i) * (3 + i) for i in range(20))
    source = make(
        documents,
        sequence_length=24,
        global_batch_size=4,
        seed=3,
        split_documents=split_documents,
    )
    halves = []
    for index in range(2):
        process = iter(source(DispatchConfig(index, 2)))
        process.set_state(json.loads(json.dumps(state)))
        halves.append(next(process)["input_ids"])
        after = process.get_state()
        assert after.keys() == state.keys()
        process.close()
    rows = np.concatenate(halves)
    letters = ["".join(chr(t) if t < EOS else "." for t in row[row <= EOS]) for row in rows]
    for row, start in zip(letters, want, strict=True):
        assert row.startswith(start)


def test_positions_of_other_batches_are_refused():
    state = iter(make()(DispatchConfig(0, 1))).get_state()
    with pytest.raises(InputDatasetError, match=r"of 12 groups of rows, and a batch has 24; set g"):
        iter(make(global_batch_size=24)(DispatchConfig(0, 1))).set_state(state)
    half = iter(make()(DispatchConfig(0, 2)))
    with pytest.raises(InputDatasetError, match=r"lacks the groups of rows \[6, 7, .* all process"):
        iter(make()(DispatchConfig(1, 2))).set_state(half.get_state())
    damaged = {
        "groups": 12,
        "positions": {PARTS: {"0": "x"} | {str(i): [0, 0] for i in range(1, 12)}},
    }
    with pytest.raises(ValueError, match="expected a list"):
        iter(make()(DispatchConfig(0, 1))).set_state(damaged)


def test_an_error_does_not_show_the_positions_of_all_rows():
    documents = records(["a", 1])
    source = make(documents, global_batch_size=128)
    input_ = Input.default_config().set(name="input", source=source).instantiate(parent=None)
    with pytest.raises(
        Exception, match=r"^input: the batch after state \{'groups': 128, "
    ) as error:
        next(input_.batches(input_.dataset()))
    assert len(str(error.value)) < 600
