"""Small tokenizers of every kind, trained on the fly, as files."""

import json

LINES = ["one two three", "Héllo wörld", "two one", "three two one", "don't , stop"] * 20


def byte_level(**kwargs):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**kwargs)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    # As code models have, to encode indentation as one token.
    tokenizer.add_tokens([AddedToken(" " * n, normalized=False) for n in (8, 4)])
    return tokenizer


def lower_case():
    from tokenizers import normalizers

    tokenizer = byte_level(add_prefix_space=False)
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def word_ends():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=80,
        special_tokens=["<unk>", "<|end|>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def word_piece():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=60, special_tokens=["[UNK]", "<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def unigram():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", "<|end|>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def byte_fallback():
    """As of Llama 2: spaces are characters, unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<|end|>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += [*"▁abcdehlnorstwö", "▁o", "ne", "▁one"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "o"), ("n", "e"), ("▁o", "ne")]
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def word_level():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<unk>": 0, "<|end|>": 1, "one": 2, "two": 3, "three": 4}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


HUGGING_FACE = {
    "byte level": lambda: byte_level(add_prefix_space=False),
    "byte level with a prefix": lambda: byte_level(add_prefix_space=True),
    "lower case": lower_case,
    "word ends": word_ends,
    "word pieces": word_piece,
    "unigram": unigram,
    "byte fallback": byte_fallback,
    "words": word_level,
}


def with_holes(path, ids):
    """Writes a tokenizer of whole letters with these ids."""
    model = {"type": "BPE", "vocab": ids, "merges": []}
    content = {"version": "1.0", "model": model, "decoder": {"type": "Fuse"}}
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


SENTENCE_PIECE = {
    "pieces": {"model_type": "unigram", "byte_fallback": True},
    "pieces of BPE": {"model_type": "bpe", "byte_fallback": True},
    "pieces without bytes": {"model_type": "unigram"},
    "normalized pieces": {
        "model_type": "unigram",
        "normalization_rule_name": "nmt_nfkc",
        "remove_extra_whitespaces": True,
    },
    "pieces without a prefix": {
        "model_type": "unigram",
        "byte_fallback": True,
        "add_dummy_prefix": False,
    },
}


def train_pieces(prefix, **kwargs):
    import sentencepiece

    size = 300 if kwargs.get("byte_fallback") else 60
    kwargs = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False} | kwargs
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(prefix),
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
        **kwargs,
    )
    return f"{prefix}.model"
