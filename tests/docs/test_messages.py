"""The tables of wrong rows and their messages, on the pages about tuning."""

import re

import pytest

from tests.pages import ROOT
from weft.errors import InputReadError
from weft.input.chat import ChatTemplate
from weft.input.conversations import num_sequences
from weft.input.preferences import preference_arrays
from weft.input.tokenizers import ByteTokenizer

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def read_answers(file):
    num_sequences(
        data=file,
        tokenizer=ByteTokenizer(),
        template=TEMPLATE,
        held_out_fraction=0,
        sequence_length=100,
    )


def read_preferences(file):
    preference_arrays(file, tokenizer=ByteTokenizer(), template=TEMPLATE)


@pytest.mark.parametrize(
    ("page", "read"), [("fine-tuning", read_answers), ("preferences", read_preferences)]
)
def test_wrong_rows_have_the_messages_of_the_page(page, read, tmp_path):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| line of the file | message |\n|---|---|\n")
    rows = re.findall(r"^\| `(.*)` \| `(.*)` \|$", table.partition("\n\n")[0], re.MULTILINE)
    assert len(rows) > 5
    file = tmp_path / "data.jsonl"
    for line, message in rows:
        file.write_text(f"{line}\n", encoding="utf-8")
        with pytest.raises(InputReadError) as caught:
            read(str(file))
        assert "line 1" in str(caught.value) and str(file) in str(caught.value)
        assert message in str(caught.value)
