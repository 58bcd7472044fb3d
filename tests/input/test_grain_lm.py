import json

import grain
import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import InputDatasetError
from weft.hierarchy.attention.stack import StackedTransformerLayer
from weft.hierarchy.causal_lm import Model, gpt_decoder_config
from weft.input.grain import Input, per_feed_batch, shard_dataset
from weft.input.grain_lm import (
    streaming_packing,
    text_to_lm_eval_input,
    text_to_lm_training_input,
)
from weft.input.grain_text import tokenize_turns
from weft.input.tokenizers import ByteTokenizer
from weft.trainer import Learner, SpmdTrainer
from weft.trainer.optimizers import adamw_optimizer

pytestmark = pytest.mark.usefixtures("one_device")

VOCAB = ByteTokenizer()
EOS, PAD = VOCAB.eos_id, VOCAB.pad_id


def texts(*values, **fields):
    return grain.MapDataset.source([{"text": value, **fields} for value in values])


def show(ids):
    return "".join({EOS: "|", PAD: "."}.get(i, chr(i % 256)) for i in ids.tolist())


def rows(ds, *keys):
    """Returns inputs and targets as text, with | for the end of a document and . for padding."""
    found = [
        (show(one["input_ids"]), show(one["target_labels"]), *(one[key].tolist() for key in keys))
        for one in ds
    ]
    return found


def training(*values, **kwargs):
    return text_to_lm_training_input(texts(*values), vocab=VOCAB, max_len=4, **kwargs)


def test_example_without_text():
    ds = text_to_lm_eval_input(grain.MapDataset.source([{"t": "a"}]), vocab=VOCAB, max_len=4)
    with pytest.raises(InputDatasetError, match=r"it has \['t'\]; rename one of these to 'text'"):
        next(iter(ds))


def test_windows_are_concatenated_and_split():
    # Windows are "|ab|cdef|" and "|g|".
    ds = training("ab", "cdef", "g", window_size=2)
    assert rows(ds, "target_num_bytes") == [
        ("|ab|", "ab|c", 3),
        ("cdef", "def|", 3),
        ("|g..", "g|..", 1),
    ]
    assert {name: value.dtype for name, value in next(iter(ds)).items()} == {
        "input_ids": np.int32,
        "target_labels": np.int32,
        "live_targets": bool,
        "target_num_bytes": np.int32,
    }


@pytest.mark.parametrize(
    "fraction, kept", [(0.0, ["ab|c"]), (0.49, ["ab|c"]), (0.5, ["ab|c", "d|.."])]
)
def test_last_example_with_too_much_padding_is_dropped(fraction, kept):
    ds = training("ab", "cd", max_padding_fraction=fraction)
    assert [targets for _, targets in rows(ds)] == kept
    assert rows(training("a", max_padding_fraction=0.25)) == []


def test_whole_texts_are_packed_greedily():
    ds = training("ab", "c", "", "d", "efghij", window_size=None)
    assert rows(ds, "target_num_bytes", "input_segment_ids", "input_positions") == [
        ("|ab.", "ab|.", 2, [1, 1, 1, 0], [0, 1, 2, 0]),
        ("|c|.", "c||.", 1, [1, 1, 2, 0], [0, 1, 0, 0]),
        ("|d..", "d|..", 1, [1, 1, 0, 0], [0, 1, 0, 0]),
        ("|efg", "efgh", 4, [1, 1, 1, 1], [0, 1, 2, 3]),
        ("hij.", "ij|.", 2, [1, 1, 1, 0], [0, 1, 2, 0]),
    ]


def evaluation(*values, **kwargs):
    ds = texts(*values, index=7)
    return text_to_lm_eval_input(ds, vocab=VOCAB, max_len=4, **kwargs)


def test_windows_of_evaluation():
    assert rows(evaluation("abcdef", "", index_key=None), "target_num_bytes") == [
        ("|abc", "abcd", 4),
        ("def.", "ef|.", 2),
        ("|...", "|...", 0),
    ]


@pytest.mark.parametrize(
    "stride, want",
    [
        (1, [("|abc", "abcd", 4), ("abcd", "...e", 1), ("bcde", "...|", 0)]),
        (2, [("|abc", "abcd", 4), ("bcde", "..e|", 1)]),
        (3, [("|abc", "abcd", 4), ("cde.", ".e|.", 1)]),
        (4, [("|abc", "abcd", 4), ("de..", "e|..", 1)]),
    ],
)
def test_strided_windows_count_each_target_once(stride, want):
    assert rows(evaluation("abcde", stride=stride), "target_num_bytes") == want
    assert rows(evaluation("abc", stride=stride)) == [("|abc", "abc|")]


@pytest.mark.parametrize("stride", [0, 5])
def test_stride_out_of_range(stride):
    with pytest.raises(
        InputDatasetError, match=rf"windows of 4 .* stride={stride}; .* from 1 to 4"
    ):
        list(evaluation("abc", stride=stride))


def test_turns_packed_whole_keep_their_masks():
    ds = grain.MapDataset.source(
        [{"prompt": "q", "response": "a"}, {"prompt": "r", "response": "bcdefgh"}]
    )
    ds = streaming_packing(tokenize_turns(ds, vocab=VOCAB), vocab=VOCAB, max_len=6)
    assert rows(ds, "target_num_bytes", "input_segment_ids", "input_positions") == [
        ("|q\na..", "..a|..", 1, [1, 1, 1, 1, 0, 0], [0, 1, 2, 3, 0, 0]),
        ("|r\nbcd", "..bcde", 4, [1] * 6, [0, 1, 2, 3, 4, 5]),
        ("efgh..", "fgh|..", 3, [1, 1, 1, 1, 0, 0], [0, 1, 2, 3, 0, 0]),
    ]


WORDS = ["abcdefghijkl"[: 1 + i % 12] for i in range(40)]


def endless(kind):
    ds = texts(*WORDS).seed(3).shuffle().repeat(None)
    if kind == "eval":
        return text_to_lm_eval_input(texts(*WORDS), vocab=VOCAB, max_len=4, stride=3)
    if kind == "turns":
        ds = ds.map(lambda one: {"prompt": one["text"], "response": one["text"]})
        return streaming_packing(tokenize_turns(ds, vocab=VOCAB), vocab=VOCAB, max_len=16)
    kwargs = {"windows": {"window_size": 5}, "stream": {"window_size": None}}[kind]
    return text_to_lm_training_input(
        ds, vocab=VOCAB, max_len=16, replace_newlines_with="<n>", **kwargs
    )


@pytest.mark.parametrize("kind", ["windows", "stream", "turns", "eval"])
def test_resumes_exactly_at_every_example(kind):
    ds = endless(kind)
    it = iter(ds)
    states, want = [], []
    for _ in range(30):
        states.append(json.loads(json.dumps(it.get_state())))
        want.append(next(it))
    it.close()
    for start in range(0, 24, 3):
        it = iter(ds)
        it.set_state(states[start])
        for expected in want[start : start + 6]:
            np.testing.assert_equal(next(it), expected)
        it.close()


def turns_source(dispatch_config):
    ds = shard_dataset(texts(*WORDS).repeat(None), dispatch_config)
    ds = ds.map(lambda one: {"prompt": one["text"], "response": one["text"]})
    ds = streaming_packing(tokenize_turns(ds, vocab=VOCAB), vocab=VOCAB, max_len=16)
    return per_feed_batch(ds, global_batch_size=8, dispatch_config=dispatch_config)


def trainer(directory, max_step):
    decoder = gpt_decoder_config(
        StackedTransformerLayer.default_config(),
        num_layers=1,
        hidden_dim=8,
        num_heads=2,
        vocab_size=264,
        max_position_embeddings=16,
    ).set(pad_token_id=PAD, eos_token_id=EOS)
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir=str(directory),
        mesh_shape=(-1, 1),
        mesh_axis_names=("data", "model"),
        max_step=max_step,
        model=Model.default_config().set(decoder=decoder),
        input=Input.default_config().set(source=turns_source),
        learner=Learner.default_config().set(
            optimizer=config_for_function(adamw_optimizer).set(
                learning_rate=0.1, b1=0.9, b2=0.95, eps=1e-8
            )
        ),
    )
    return cfg.instantiate(parent=None)


@pytest.mark.long
@pytest.mark.usefixtures("one_device")
def test_trainer_takes_two_steps_on_turns_and_resumes(tmp_path):
    whole = trainer(tmp_path / "whole", 2).run()
    assert trainer(tmp_path / "parts", 1).run()["loss"] > whole["loss"] > 0
    resumed = trainer(tmp_path / "parts", 2).run()
    assert resumed["loss"] == whole["loss"]


class PaddedWithEnds(ByteTokenizer):
    """As checkpoints have it that name no token for padding."""

    pad_id = EOS


@pytest.mark.parametrize("window_size", [128, None])
def test_ends_count_where_they_also_pad(window_size):
    ds = texts("ab", "c")
    kwargs = {"vocab": PaddedWithEnds(), "max_len": 8, "window_size": window_size}
    (example,) = text_to_lm_training_input(ds, **kwargs)
    assert show(example["input_ids"])[:5] == "|ab|c"
    assert show(example["target_labels"])[:5] == "ab|c|"
    assert example["live_targets"].tolist() == [True] * 5 + [False] * 3
    assert example["target_num_bytes"] == 3
    turns = grain.MapDataset.source([{"prompt": "q", "response": "ab"}])
    turns = tokenize_turns(turns, vocab=PaddedWithEnds())
    (example,) = streaming_packing(turns, vocab=PaddedWithEnds(), max_len=8)
    assert show(example["input_ids"]) == "|q\nab|||"
    assert show(example["target_labels"]) == "||" + "ab|" + "|||"
    assert example["live_targets"].tolist() == [False] * 2 + [True] * 3 + [False] * 3


def test_index_is_that_of_the_text():
    ds = grain.MapDataset.source([{"text": "abcdef", "id": "x"}, {"text": "g", "id": 3}])
    windows = text_to_lm_eval_input(ds, vocab=VOCAB, max_len=4, index_key="id")
    assert [one["id"] for one in windows] == ["x", "x", 3]
