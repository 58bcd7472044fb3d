"""Rows of preferences and prompts as tokens, and the errors for bad rows."""

import json

import numpy as np
import pytest

from weft.errors import EmptyCorpusError, InputDatasetError, InputReadError
from weft.input.chat import ChatTemplate
from weft.input.preferences import preference_arrays, prompt_arrays
from weft.input.tokenizers import ByteTokenizer

END, PAD = ByteTokenizer.eos_id, ByteTokenizer.pad_id
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
STRINGS = {"prompt": "2+2=", "chosen": "4", "rejected": "five"}
USER = {"role": "user", "content": "2+2?"}
FIRST = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


def answer(content):
    return [{"role": "assistant", "content": content}]


MESSAGES = {"prompt": [*FIRST, USER], "chosen": answer("4"), "rejected": answer("five")}
CONVERSATIONS = {
    name: [*FIRST, USER, *answer(content)] for name, content in (("chosen", "4"), ("rejected", "x"))
}


def write(tmp_path, *rows):
    file = tmp_path / "preferences.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def text(ids):
    """The text of ids, with the end as "$" and without padding."""
    return bytes([ord("$") if x == END else x for x in ids if x != PAD]).decode()


def test_strings_are_written_as_they_are(tmp_path):
    arrays = preference_arrays(write(tmp_path, STRINGS, STRINGS)).value
    assert arrays["input_ids"].shape == (2, 2, 8)
    expected = ["4$", "five$"]
    for i, answer_text in enumerate(expected):
        ids, labels, live = (
            arrays[name][0, i] for name in ("input_ids", "target_labels", "live_targets")
        )
        assert text(ids) == "2+2=" + answer_text[:-1]
        assert text(labels[live]) == answer_text
        np.testing.assert_array_equal(labels[:4], ids[1:5])


@pytest.mark.parametrize("row", [MESSAGES, CONVERSATIONS])
def test_messages_are_written_by_the_template(row, tmp_path):
    arrays = preference_arrays(write(tmp_path, row), template=TEMPLATE).value
    ids, labels, live = (
        arrays[name][0, 0] for name in ("input_ids", "target_labels", "live_targets")
    )
    assert text(ids) == "u:Hi\na:Yes\nu:2+2?\na:4"
    # Of the assistant's turns, only that of the answer.
    assert text(labels[live]) == "4\n"


def test_held_out_rows_are_not_trained_on_and_prompts_keep_the_number_of_their_row(tmp_path):
    rows = [{"prompt": f"{i}", "chosen": "yes", "rejected": "no"} for i in range(10)]
    file = write(tmp_path, *rows)
    numbers = {}
    for part in ("train", "held_out"):
        arrays = prompt_arrays(file, part=part, held_out=0.2).value
        numbers[part] = arrays["row"].tolist()
        prompts = [
            text(ids[:length])
            for ids, length in zip(arrays["prompt_ids"], arrays["prompt_length"], strict=True)
        ]
        assert prompts == [f"{i}" for i in arrays["row"]]
        pairs = preference_arrays(file, part=part, held_out=0.2).value
        firsts = [text(ids)[:1] for ids in pairs["input_ids"][:, 0]]
        assert firsts == prompts
    assert sorted(numbers["train"] + numbers["held_out"]) == list(range(10))
    assert len(numbers["held_out"]) == 2


def test_long_rows_are_left_out_with_a_warning(tmp_path, caplog):
    long = {**STRINGS, "rejected": "x" * 50}
    file = write(tmp_path, STRINGS, long)
    assert preference_arrays(file, max_length=20).num_rows == 1
    assert "1 of 2 rows" in caplog.text and "max_length=20" in caplog.text
    with pytest.raises(InputDatasetError, match=r"has 2 rows, all with more than max_length=3"):
        preference_arrays(file, max_length=3)


BAD_ROWS = [
    ([1], "the row is of type list; expected a dict with 'prompt'"),
    (
        {"prompt": "a", "choosen": "b", "rejected": "c"},
        "the row has no 'chosen', it has ['choosen', 'prompt', 'rejected']. Did you mean 'choosen'",
    ),
    ({"chosen": "b", "rejected": "c"}, "the row has no 'prompt'"),
    ({**STRINGS, "rejected": None}, "the row has no 'rejected'"),
    ({**STRINGS, "rejected": 5}, "'rejected' of the row is 5; expected a string, or a list"),
    ({**STRINGS, "rejected": "4"}, "'chosen' and 'rejected' of the row are the same"),
    ({**STRINGS, "prompt": [USER]}, "'prompt' of the row is of type list, and 'chosen' of type"),
    (
        {**STRINGS, "rejected": answer("5")},
        "'chosen' of the row is of type str, and 'rejected' of type list; expected two strings",
    ),
    ({**MESSAGES, "chosen": []}, "'chosen' of the row is []; expected a string, or a list"),
    ({**MESSAGES, "chosen": ["4"]}, "chosen[0] of the row is of type str; expected a dict"),
    ({**STRINGS, "chosen": " "}, "'chosen' of the row is empty, so that the model would learn to"),
    ({**MESSAGES, "chosen": answer("")}, "'chosen' of the row has an answer of the assistant that"),
    (
        {**MESSAGES, "prompt": [*FIRST, {"content": "2+2?"}]},
        "messages[2] has ['content'] and the role None; expected a string",
    ),
    ({**MESSAGES, "rejected": [FIRST[0]]}, "'rejected' of the row has no turn of the role 'ass"),
    (
        {"chosen": answer("4"), "rejected": answer("5")},
        "begin with different turns, and there is no 'prompt'",
    ),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_bad_rows_are_named(row, message, tmp_path):
    file = write(tmp_path, STRINGS, row)
    with pytest.raises(InputReadError) as caught:
        preference_arrays(file, template=TEMPLATE)
    assert f"line 2 of {file}: " in str(caught.value)
    assert message in str(caught.value)


def test_messages_need_a_template_and_prompts_a_prompt(tmp_path):
    with pytest.raises(InputReadError, match="there is no chat template to write them"):
        preference_arrays(write(tmp_path, MESSAGES))
    with pytest.raises(InputReadError, match="the row has no 'prompt', it has"):
        prompt_arrays(write(tmp_path, {"question": "2+2="}))
    with pytest.raises(InputReadError, match="'prompt' of the row is empty, and the tokenizer"):
        prompt_arrays(write(tmp_path, {"prompt": ""}))
    with pytest.raises(InputReadError, match="'prompt' of the row ends with a turn of the user th"):
        prompt_arrays(write(tmp_path, {"prompt": " "}), template=TEMPLATE)
    with pytest.raises(InputReadError, match="there is no chat template to write them"):
        prompt_arrays(write(tmp_path, {"prompt": [USER]}))
    with pytest.raises(EmptyCorpusError, match="has no rows; expected a JSON object in each line"):
        prompt_arrays(write(tmp_path))
    with pytest.raises(InputReadError, match="'prompt' of the row ends with a turn of the assista"):
        prompt_arrays(write(tmp_path, {"prompt": FIRST}), template=TEMPLATE)
    with pytest.raises(InputReadError, match=r"'prompt' of the row is 5; expected a string, or a"):
        prompt_arrays(write(tmp_path, {"prompt": 5}))
    with pytest.raises(InputDatasetError, match=r"has 1 rows, all with more than max_length=3"):
        prompt_arrays(write(tmp_path, {"prompt": "2+2+2="}), max_length=3)


def test_prompts_are_turns_of_the_user_if_there_is_a_template(tmp_path):
    file = write(tmp_path, {"prompt": "2+2?"}, {"prompt": [*FIRST, USER]})
    arrays = prompt_arrays(file, template=TEMPLATE).value
    prompts = [text(ids) for ids in arrays["prompt_ids"]]
    assert prompts == ["u:2+2?\na:", "u:Hi\na:Yes\nu:2+2?\na:"]
