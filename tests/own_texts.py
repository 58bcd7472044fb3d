"""Texts and a tokenizer of one's own, as a person has them in a folder."""

import email
import inspect
import json
from pathlib import Path

VOCABULARY_SIZE = 300
"""Of the tokenizer's file, to which the end and the padding add one id each."""


def write_own_texts(folder: Path) -> None:
    """Writes `notes.jsonl`, and `tokenizer.json`, trained on it; needs the extra `text`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [inspect.getsource(email), *inspect.getsource(inspect).split("\n\n\n")]
    lines = [json.dumps({"text": text, "source": "inspect"}) for text in texts]
    (folder / "notes.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
