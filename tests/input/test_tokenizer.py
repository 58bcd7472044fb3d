import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.input.tokenizer import ByteTokenizer


@settings(deadline=None, max_examples=25)
@given(st.text())
def test_every_text_comes_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_ids_lie_above_the_bytes_and_are_not_text():
    tokenizer = ByteTokenizer()
    assert sorted({tokenizer.eos_id, tokenizer.pad_id}) == [256, 257]
    assert tokenizer.vocab_size == 258
    assert tokenizer.decode([tokenizer.eos_id, 104, 105, tokenizer.pad_id]) == "hi"


def test_half_a_character_does_not_raise():
    assert ByteTokenizer().decode([104, 195]) == "h\ufffd"
