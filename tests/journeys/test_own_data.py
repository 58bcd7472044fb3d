"""Own data from the command line, as the page about input tells it, and the mistakes on the way."""

import contextlib

import numpy as np
import pytest

from tests.own_texts import VOCABULARY_SIZE, write_own_texts
from weft.cli import main
from weft.interop.huggingface import from_huggingface

pytestmark = pytest.mark.usefixtures("one_device")

TRAIN = ("train", "lm-tiny", "data_dir=notes.jsonl", "dir=run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with own text and a tokenizer of it."""
    pytest.importorskip("tokenizers", reason="needs the extra text")
    folder = tmp_path_factory.mktemp("own")
    write_own_texts(folder)
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    with contextlib.chdir(folder):
        assert main([*TRAIN, "tokenizer=tokenizer.json", "max_step=12"]) == 0
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def said(capsys, *arguments, code=0):
    assert main(list(arguments)) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


@pytest.mark.long
@pytest.mark.usefixtures("trained")
def test_run_is_sampled_and_exported(here, capsys):
    assert said(capsys, "sample", "run", "--prompt", "def ", "--tokens", "8").startswith("def ")
    said(capsys, "export", "run", "--to", "exported")
    cfg, params = from_huggingface(here / "exported")
    assert cfg.decoder.vocab_size == 304 and cfg.decoder.eos_token_id == VOCABULARY_SIZE
    assert np.asarray(params["decoder"]["emb"]["token_emb"]["weight"]).shape == (304, 24)
    written = (here / "exported" / "tokenizer.json").read_bytes()
    assert written == (here / "tokenizer.json").read_bytes()


@pytest.mark.long
@pytest.mark.usefixtures("trained", "here")
def test_longer_run_keeps_its_curve_and_says_so(capsys):
    out = said(capsys, *TRAIN, "tokenizer=tokenizer.json", "max_step=13", "evalers={}")
    assert "schedule   12 steps, as when the run began; then the learning rate stays 0.001" in out
    shown = said(capsys, "config", "show", "run")
    assert shown.splitlines()[-1].endswith("max_step is 12, the max_step with which the run began.")


TOKENIZER = "input.source.tokenizer=tokenizer.json"
MISTAKES = {
    "more ids than the vocabulary": (
        [TOKENIZER],
        "the tokenizer of input.source.tokenizer does not fit the model: it has 302 ids, and "
        "model.decoder.vocab_size=264; its pad_id is 301, and model.decoder.pad_token_id=257; its "
        "eos_id is 300, and model.decoder.eos_token_id=256. Set model.decoder.vocab_size=302 ",
    ),
    "another tokenizer to evaluate": (
        ["tokenizer=tokenizer.json", "evalers['held_out'].input.source.tokenizer=other.json"],
        "the tokenizers differ: input.source.tokenizer is HuggingFaceTokenizer('tokenizer.json'",
    ),
    "padding outside of the vocabulary": (
        ["model.decoder.pad_token_id=264"],
        "model.decoder.pad_token_id=264 is outside of the vocabulary, model.decoder.vocab_size=264",
    ),
    "sequence longer than the positions": (
        ["model.decoder.emb.pos_emb=weft.hierarchy.LearnedPositionalEmbedding.Config(shape=(16,))"],
        "input.source.sequence_length=32 is longer than the model's table of positions, "
        "model.decoder.emb.pos_emb.shape=(16,)",
    ),
    "missing tokenizer": (
        ["input.source.tokenizer=missing.json"],
        "cannot read the tokenizer missing.json (No such file or directory)",
    ),
    "another kind of file": (
        ["input.source.tokenizer=notes.jsonl"],
        "'notes.jsonl' is not the path of a tokenizer",
    ),
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_refused_before_the_first_step(here, capsys, words, message):
    (here / "other.json").write_text(
        (here / "tokenizer.json").read_text(encoding="utf-8") + "\n", encoding="utf-8"
    )
    assert message in said(capsys, *TRAIN, "dir=none", *words, code=2)
    assert not (here / "none").exists()
