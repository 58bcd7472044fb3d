"""Rows of data as packed batches whose answers alone are learned."""

import json

import numpy as np
import pytest

from weft.errors import EmptyCorpusError, InputDatasetError, InputReadError
from weft.input.chat import ChatTemplate, LearnedTokens
from weft.input.conversations import (
    PackedRows,
    Rows,
    conversation_source,
    num_sequences,
    prompt_source,
)
from weft.input.grain import DispatchConfig
from weft.input.tokenizers import ByteTokenizer

TEMPLATE = ChatTemplate("{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}"
                        "{% if add_generation_prompt %}<a>{% endif %}")  # fmt: skip
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
ROWS = [{"messages": MESSAGES}, {"prompt": "a", "completion": "b"}, {"text": "xyz"}]


def batches(source, **shard):
    return list(source(DispatchConfig(**{"shard_index": 0, "num_shards": 1} | shard)))


def rows_of(lengths):
    return [
        LearnedTokens(np.full(n, i + 1, np.int32), np.arange(n) > 0) for i, n in enumerate(lengths)
    ]


def test_answers_alone_are_targets_and_rows_do_not_see_each_other():
    source = conversation_source(
        data=Rows(ROWS),
        tokenizer=ByteTokenizer(),
        template=TEMPLATE,
        split="train",
        held_out_fraction=0,
        sequence_length=16,
        global_batch_size=2,
        is_training=False,
    )
    (batch,) = batches(source)
    # Of the text, which has no beginning, the first token is not a target.
    targets = [ByteTokenizer().decode(row) for row in batch["target_labels"]]
    assert targets == ["Yes;yz", "b;"]
    assert batch["live_targets"].sum(1).tolist() == [4 + 3, 2]
    assert set(batch["input_segment_ids"][0].tolist()) == {0, 1, 2}
    for row, positions in zip(batch["input_segment_ids"], batch["input_positions"], strict=True):
        for segment in set(row.tolist()) - {0}:
            count = (row == segment).sum()
            np.testing.assert_array_equal(positions[row == segment], np.arange(count))


def test_rows_are_packed_whole_and_long_ones_cut(caplog):
    packed = PackedRows(rows_of([5, 4, 3, 9]), sequence_length=7, pad_id=0, pad_to_multiple_of=4)
    assert "1 of 4 rows with more than sequence_length=7 tokens" in caplog.text
    assert len(packed) == 4
    batch = packed.take(np.arange(4))
    assert batch["input_ids"].tolist() == [
        [1, 1, 1, 1, 2, 2, 2],
        [3, 3, 0, 0, 0, 0, 0],
        [4, 4, 4, 4, 4, 4, 4],
        [0] * 7,
    ]
    assert batch["live_targets"].sum() == 4 + 3 + 2 + 7


def test_held_out_rows_do_not_depend_on_their_order():
    rows = [{"text": f"row {i}"} for i in range(20)]

    def texts(rows, split):
        source = conversation_source(
            data=Rows(rows),
            tokenizer=ByteTokenizer(),
            split=split,
            held_out_fraction=0.2,
            sequence_length=8,
            global_batch_size=4,
            is_training=False,
        )
        inputs = np.concatenate([batch["input_ids"] for batch in batches(source)])
        return {ByteTokenizer().decode(x) for x in inputs if (x != ByteTokenizer.pad_id).any()}

    held_out, train = texts(rows, "held_out"), texts(rows, "train")
    assert len(held_out) == 4 and len(train) == 16 and not held_out & train
    assert texts(rows[::-1], "held_out") == held_out


def test_training_batches_are_those_of_all_processes():
    source = conversation_source(
        data=Rows([{"text": "x" * n} for n in range(1, 20)]),
        tokenizer=ByteTokenizer(),
        split="train",
        held_out_fraction=0,
        sequence_length=20,
        global_batch_size=4,
        is_training=True,
    )
    whole = iter(source(DispatchConfig(0, 1)))
    halves = [iter(source(DispatchConfig(i, 2))) for i in range(2)]
    for _ in range(5):
        parts = [next(half)["input_ids"] for half in halves]
        np.testing.assert_array_equal(np.concatenate(parts), next(whole)["input_ids"])


def test_prompts_of_held_out_rows():
    (batch,) = batches(
        prompt_source(
            data=Rows([{"prompt": "question ", "completion": str(i)} for i in range(3)]),
            tokenizer=ByteTokenizer(),
            held_out_fraction=0.3,
            prompt_length=12,
            num_prompts=2,
        )
    )
    assert [ByteTokenizer().decode(x) for x in batch["input_ids"]] == ["question "] * 2
    assert batch["input_segment_ids"].sum(1).tolist() == [9, 9]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_files(form, tmp_path):
    path = tmp_path / f"data.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1]), path)
    fields = {"tokenizer": ByteTokenizer(), "template": TEMPLATE, "held_out_fraction": 0}
    assert num_sequences(data=str(path), sequence_length=64, **fields) == 1


def test_data_that_cannot_be_learned(tmp_path):
    def count(data, **fields):
        arguments = {"tokenizer": ByteTokenizer(), "held_out_fraction": 0, "sequence_length": 8}
        return num_sequences(data=data, **{**arguments, **fields})

    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"question": "b"}\n', encoding="utf-8")
    with pytest.raises(InputReadError, match=r"data.jsonl.*\['question'\]"):
        count(str(path))
    with pytest.raises(InputDatasetError, match=r"row 1 of the data: the row has \['question'\]"):
        count(Rows([{"text": "a"}, {"question": "b"}]))
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(EmptyCorpusError, match=r"data.jsonl has no rows; expected a JSON object"):
        count(str(path))
    with pytest.raises(InputDatasetError, match=r"held_out_fraction=1 leaves no rows"):
        count(Rows(ROWS), held_out_fraction=1)
    with pytest.raises(EmptyCorpusError, match=r"1 rows, and none has an answer within"):
        count(Rows([{"prompt": "long question", "completion": "b"}]))
    with pytest.raises(EmptyCorpusError, match=r"1 rows, and none is in the 'train' part"):
        count(Rows([{"text": "a"}]), held_out_fraction=0.5)
