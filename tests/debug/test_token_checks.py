"""A trainer refuses inputs whose ids or positions its model does not have."""

import pytest

from tests.input import tokenizer_kinds
from weft.cli.configs import load_config
from weft.config import config_for_class
from weft.debug.lookup_checks import check_tokens
from weft.errors import InputDatasetError, TokenizerError
from weft.hierarchy import LearnedPositionalEmbedding
from weft.input import ByteTokenizer
from weft.recipes.lm_nnx import LanguageModel
from weft.trainer.run_dir import end_ids


class WideTokenizer(ByteTokenizer):
    """Bytes with a thousand further ids."""

    vocab_size = 1258
    eos_id, pad_id = 1256, 1257
    fingerprint = "wide"


class OtherTokenizer(ByteTokenizer):
    """The same numbers of other texts."""

    fingerprint = "other"


class SizedModel(LanguageModel):
    """Model that declares its vocabulary, as a user's own does."""

    def __init__(self, vocab_size: int, **kwargs):
        super().__init__(**kwargs)


def refused(cfg, error, *words):
    with pytest.raises(error) as raised:
        cfg.instantiate(parent=None)
    assert all(word in str(raised.value) for word in words), raised.value


def with_wide_tokenizer(cfg):
    for one in (cfg.input, cfg.evalers["held_out"].input):
        one.source.tokenizer = config_for_class(WideTokenizer)
    return cfg


def test_tokenizer_with_more_ids_than_the_model():
    refused(
        with_wide_tokenizer(load_config("lm-tiny")),
        TokenizerError,
        "the tokenizer of input.source.tokenizer does not fit the model: it has 1258 ids, and "
        "model.decoder.vocab_size=264; its pad_id is 1257, and model.decoder.pad_token_id=257",
        "Set model.decoder.vocab_size=1258 model.decoder.",
    )
    model = config_for_class(SizedModel).set(vocab_size=264)
    cfg = with_wide_tokenizer(load_config("lm-nnx")).set(model=model)
    refused(cfg, TokenizerError, "it has 1258 ids, and model.vocab_size=264. Set model.vocab_size")


def test_ids_with_holes_need_a_row_for_the_largest(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra text")
    ids = {"a": 0, "b": 1, "d": 300}
    cfg = load_config("lm-tiny")
    for one in (cfg.input, cfg.evalers["held_out"].input):
        one.source.tokenizer = tokenizer_kinds.with_holes(tmp_path / "tokenizer.json", ids)
    refused(cfg, TokenizerError, "it has 303 ids, and model.decoder.vocab_size=264")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pad_token_id=264", "model.decoder.pad_token_id=264 is outside of the vocabulary"),
        ("eos_token_id=300", "model.decoder.eos_token_id=300 is outside of the vocabulary"),
        ("eos_token_id=10", "its eos_id is 256, and model.decoder.eos_token_id=10. Set model"),
        ("eos_token_id=(10, 20)", "and model.decoder.eos_token_id=(10, 20). Set model"),
        ("eos_token_id=(256, 300)", "model.decoder.eos_token_id=300 is outside of the vocabulary"),
        ("pad_token_id=-1", "its pad_id is 257, and model.decoder.pad_token_id=-1. Set model"),
    ],
)
def test_special_ids(override, message):
    refused(load_config("lm-tiny", [f"model.decoder.{override}"]), TokenizerError, message)


def test_one_of_several_ends_is_that_of_the_tokenizer():
    cfg = load_config("lm-tiny", ["model.decoder.eos_token_id=(10, 256)"])
    check_tokens(cfg)
    assert end_ids(cfg.model) == [10, 256]


def test_evaler_with_another_tokenizer():
    cfg = load_config("lm-tiny")
    cfg.evalers["held_out"].input.source.tokenizer = config_for_class(OtherTokenizer)
    refused(
        cfg,
        TokenizerError,
        "input.source.tokenizer is ByteTokenizer(), and evalers['held_out'].input.source.tokenizer",
    )


def test_sequence_longer_than_the_positions():
    cfg = load_config("lm-tiny", ["input.source.sequence_length=40"])
    cfg.model.decoder.emb.pos_emb = LearnedPositionalEmbedding.default_config().set(shape=(36,))
    refused(
        cfg,
        InputDatasetError,
        "input.source.sequence_length=40 is longer",
        "model.decoder.emb.pos_emb.shape=(36,). Set input.source.sequence_length=36, or model.",
    )
