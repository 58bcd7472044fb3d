"""Does a step of 20 ms ever wait for its batch of 32 × 1,024 tokens?

For each way of reading text: steps that take 20 ms of a device and nothing of the host, fed as the
trainer feeds them, against steps that need no data. And by itself: the CPU time of all threads that
make a batch, as a share of 20 ms, so 1 is one core.
"""

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import Row, ratios, row
from weft.input import PrefetchingIterator, stdlib_corpus
from weft.input.datasets import json_lines_dataset, text_dataset
from weft.input.grain import DispatchConfig
from weft.input.text import lm_documents_source, lm_stream_source
from weft.input.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer

STEP_SECONDS = 0.020
ROWS, LENGTH = 32, 1024
STEPS, PAIRS, BATCHES = 10, 15, 10


def _write(folder: Path) -> None:
    """Writes the standard library's text as JSON lines and plain text, and trains tokenizers."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [file.text.decode(errors="ignore") for file in stdlib_corpus().split("train")]
    (folder / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8"
    )
    (folder / "lines.txt").write_text("\n".join(texts), encoding="utf-8")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=16_000, show_progress=False)
    bpe.train_from_iterator(texts[::8], trainer)
    bpe.save(str(folder / "tokenizer.json"))
    lines = itertools.chain.from_iterable(text.splitlines() for text in texts[::16])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=filter(None, lines),
        model_prefix=str(folder / "pieces"),
        vocab_size=8_000,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )


def _floor(tokenizer: Any, texts: Sequence[str]) -> str:
    """Returns why a target is missed: the share of a step that the tokenizer library takes."""
    start, tokens = time.process_time(), 0
    for text in texts:
        tokens += len(next(iter(tokenizer._encode([text]))))
        if tokens >= BATCHES * ROWS * LENGTH:
            break
    seconds = (time.process_time() - start) / tokens
    share = seconds * ROWS * LENGTH / STEP_SECONDS
    return (
        f"the tokenizer library takes {seconds * 1e6:.2g} µs per token, {share:.2g} of the 20 ms "
        "per batch, which is all that could be saved; text packed before training costs nothing"
    )


def _sources(folder: Path) -> Iterator[tuple[str, Callable[[], Any], str]]:
    def documents(**kwargs: Any) -> Any:
        return lambda: lm_documents_source(**common, **kwargs)

    def stream(**kwargs: Any) -> Any:
        return lambda: lm_stream_source(**common, **kwargs)

    common = {"sequence_length": LENGTH, "global_batch_size": ROWS, "is_training": True}
    jsonl = json_lines_dataset(str(folder / "text.jsonl"))
    lines = text_dataset(str(folder / "lines.txt"), document="line")
    bpe = HuggingFaceTokenizer(str(folder / "tokenizer.json"))
    pieces = SentencePieceTokenizer(str(folder / "pieces.model"))
    both = {"jsonl": jsonl, "lines": lines}
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").open()]
    yield "packed, bytes", documents(documents=jsonl, segments=True), ""
    yield "packed, BPE", documents(documents=jsonl, segments=True, tokenizer=bpe), ""
    weights = {"jsonl": 2.0, "lines": 1.0}
    yield "packed, mixture", documents(documents=both, weights=weights, segments=True), ""
    yield "on the fly, bytes", stream(documents=jsonl), ""
    for name, tokenizer in (("SentencePiece", pieces), ("BPE", bpe)):
        made = stream(documents=jsonl, tokenizer=tokenizer)
        yield f"on the fly, {name}", made, _floor(tokenizer, texts)


def run() -> list[Row]:
    """Measures each way of reading text, in steps and alone."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder))
        for name, make, why in _sources(Path(folder)):
            start = time.perf_counter()
            source = make()(DispatchConfig(0, 1))
            made = time.perf_counter() - start
            rows += _measured(name, source, f"ready after {made:.2g} s", why)
    return rows


def _measured(name: str, source: Any, note: str, why: str) -> list[Row]:
    def to_device(it: Any) -> Any:
        return (jax.block_until_ready(jax.device_put(batch)) for batch in it)

    def steps(batches: Any) -> None:
        for _ in range(STEPS):
            next(batches)
            time.sleep(STEP_SECONDS)

    with PrefetchingIterator(iter(source), stream=to_device) as batches:
        measured = ratios(lambda: steps(batches), lambda: steps(itertools.repeat(0)), pairs=PAIRS)
    fed = row(
        f"steps of 20 ms fed by text, {name} / not fed",
        measured,
        at_most=1.05,
        note=note,
        why=why,
    )
    it = iter(source)
    next(it)
    times = []
    for _ in range(PAIRS):
        start = time.process_time()
        for _ in range(BATCHES):
            next(it)
        times.append((time.process_time() - start) / BATCHES)
    it.close()
    cores = [seconds / STEP_SECONDS for seconds in times]
    alone = row(
        f"CPU time of a batch of text, {name} / 20 ms",
        (cores, times, [STEP_SECONDS]),
        at_most=1.0,
        why=why,
    )
    return [fed, alone]
