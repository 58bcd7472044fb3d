"""A `tokenizer.json`: loaded and used, or refused with TokenizerError."""

import functools
import json
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import tokenizers

from tests.fuzz.readers import DEEP, damaged, damaged_json, read, source_of, untouched
from weft.errors import TokenizerError
from weft.input.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, text_num_bytes


@functools.cache
def _valid() -> list[bytes]:
    made = []
    for model, decoder in (
        (tokenizers.models.BPE(), tokenizers.decoders.ByteLevel()),
        (tokenizers.models.WordLevel(unk_token="<unk>"), None),
    ):
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        if decoder is not None:
            tokenizer.decoder = decoder
        trainer = model.get_trainer() if hasattr(model, "get_trainer") else None
        tokenizer.train_from_iterator(["a b ab abc", "b c"], trainer)
        tokenizer.add_special_tokens(["<eos>"])
        made.append(tokenizer.to_str().encode())
    return made


_CRAFTED = [b"", b"[]", b"{}", DEEP.encode(), b"\xff", b"9" * 5_000, b'{"a":' * 2_000]
CASES = st.deferred(
    lambda: st.one_of(
        st.sampled_from(_CRAFTED), damaged_json([*map(json.loads, _valid())]), damaged(_valid())
    )
)
SHORT = 30


def check(case: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "tokenizer.json")
        path.write_bytes(case)
        with untouched(Path(name)):
            returned, tokenizer = read(lambda: HuggingFaceTokenizer(str(path)), TokenizerError)
            read(lambda: SentencePieceTokenizer(str(path)), TokenizerError)
            if returned:
                done, ids = read(lambda: tokenizer.encode("ab c <eos>"), TokenizerError)
                if done:
                    read(lambda: tokenizer.decode([*ids, 0]), TokenizerError)
                    read(lambda: text_num_bytes(tokenizer, "ab c <eos>", ids), TokenizerError)
                read(lambda: tokenizer.token_num_bytes, TokenizerError)
                read(lambda: tokenizer.bos_ids, TokenizerError)


def source(case: bytes) -> str:
    return source_of("fuzz_tokenizers", case)
