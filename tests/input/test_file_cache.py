import errno
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import types

import grain
import jax
import numpy as np
import pytest

from weft.errors import EmptyCorpusError, InputReadError
from weft.input import file_cache
from weft.input.datasets import json_lines_dataset
from weft.input.file_cache import (
    cache_folder,
    cached_bytes,
    tokenize_documents,
)
from weft.input.tokenizers import ByteTokenizer


class Words:
    """A word is its length; refuses `bad`."""

    eos_id, pad_id, fingerprint = 0, 99, "words"
    calls = 0

    def __init__(self, vocab_size=100):
        self.vocab_size = vocab_size
        self.token_num_bytes = np.arange(vocab_size)

    def encode(self, text):
        return self.encode_batch([text])[0]

    def encode_batch(self, texts):
        type(self).calls += 1
        if any("bad" in text for text in texts):
            raise ValueError("no such word")
        return [np.array([len(word) for word in text.split()], np.int32) for text in texts]

    def decode(self, ids):
        return " ".join("a" * length for length in ids)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Words.calls = 0
    return tmp_path


@pytest.mark.parametrize("batch", [1, 10, 10**6])
def test_tokens_are_independent_of_tokenization_batch(monkeypatch, batch):
    monkeypatch.setattr(file_cache, "_BATCH_CHARACTERS", batch)
    documents = grain.MapDataset.source([{"text": t} for t in ("a bb", "", "ccc", "dd e")])
    tokens = tokenize_documents(documents, Words()).stream
    assert tokens.tolist() == [0, 1, 2, 0, 0, 3, 0, 2, 1, 0]
    assert tokens.dtype == np.uint16
    assert tokenize_documents(documents, Words(70_000)).stream.dtype == np.uint32


def test_progress_is_logged_every_thirty_seconds(monkeypatch, caplog):
    moments = iter([0.0, 20.0, 31.0, 31.0, 50.0, 70.0, 70.0])
    clock = types.SimpleNamespace(monotonic=lambda: next(moments))
    monkeypatch.setattr(file_cache, "time", clock)
    monkeypatch.setattr(file_cache, "_BATCH_CHARACTERS", 1)
    documents = grain.MapDataset.source([{"text": t} for t in ("a", "b", "c", "d")])
    with caplog.at_level("INFO", "weft.input.file_cache"):
        tokenize_documents(documents, Words())
    assert [m for m in caplog.messages if "of 4" in m] == [
        "tokenized 2 of 4 documents",
        "tokenized 4 of 4 documents",
    ]


def test_filtered_records_are_skipped():
    documents = grain.MapDataset.source([{"text": t} for t in ("a", "bb", "c")])
    kept = documents.filter(lambda d: d["text"] != "bb")
    assert tokenize_documents(kept, ByteTokenizer()).stream.tolist() == [256, 97, 256, 99, 256]


def test_tokens_of_large_files_are_kept(folder, monkeypatch):
    monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", 0)
    for text, calls in (("one three", 1), ("one three", 1), ("other", 2)):
        if calls > Words.calls:
            (folder / "a.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
        tokens = tokenize_documents(json_lines_dataset("a.jsonl"), Words()).stream
        assert tokens.tolist() == [0, *map(len, text.split()), 0]
        assert Words.calls == calls
    # Mapped datasets have no fingerprint, so they are tokenized each time.
    mapped = json_lines_dataset("a.jsonl").map(lambda d: {"text": "a"})
    for _ in range(2):
        assert tokenize_documents(mapped, Words()).stream.tolist() == [0, 1, 0]
    assert Words.calls == 4


class Letters:
    """A letter is its code. Counts 3 bytes for `b`, which is corrected; may not decode a `b`."""

    fingerprint, vocab_size, eos_id, pad_id = "letters", 256, 0, 1

    def __init__(self, is_known=True):
        self.token_num_bytes = np.where(np.arange(256) == ord("b"), 3, 1)
        self._is_known = is_known
        self.documents = 0

    def encode_batch(self, texts):
        self.documents += len(texts)
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids):
        text = "".join(map(chr, ids))
        return text if self._is_known else text.replace("b", "?")


def write_documents(folder):
    texts = ["ab" * (i % 7) + "c" for i in range(200)]
    for number in range(4):
        lines = [json.dumps({"text": text}) for text in texts[50 * number : 50 * (number + 1)]]
        (folder / f"{number}.jsonl").write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("part_bytes", [10, 300, 10**6])
def test_tokens_are_independent_of_parts(folder, monkeypatch, is_known, part_bytes):
    write_documents(folder)
    want = tokenize_documents(json_lines_dataset("*.jsonl"), Letters(is_known))
    assert not (folder / "cache").exists()
    monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", 0)
    monkeypatch.setattr(file_cache, "_PART_BYTES", part_bytes)
    for _ in range(2):
        found = tokenize_documents(json_lines_dataset("*.jsonl"), Letters(is_known))
        assert found.stream.tolist() == want.stream.tolist()
        if is_known:
            assert found.corrections.tolist() == want.corrections.tolist() != []
        else:
            assert found.corrections is want.corrections is None
    assert not os.listdir(folder / "cache/weft/token_parts")
    # Also without one of the two files, such as after an interruption.
    (damaged,) = (folder / "cache/weft/token_bytes").glob("*[!k]")
    damaged.write_bytes(b"damaged")
    found = tokenize_documents(json_lines_dataset("*.jsonl"), Letters(is_known))
    assert found.stream.tolist() == want.stream.tolist()


def test_each_of_four_processes_tokenizes_a_part(folder, monkeypatch):
    write_documents(folder)
    want = tokenize_documents(json_lines_dataset("*.jsonl"), Letters()).stream.tolist()
    monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", 0)
    documents = json_lines_dataset("*.jsonl")
    monkeypatch.setattr(file_cache, "_PART_BYTES", -(-documents.num_bytes // 8))
    same_pace = threading.Barrier(4)

    class Paced(Letters):
        def encode_batch(self, texts):  # a part
            same_pace.wait(timeout=20)
            return super().encode_batch(texts)

    tokenizers = [Paced() for _ in range(4)]
    found = []

    def process(tokenizer):
        found.append(tokenize_documents(json_lines_dataset("*.jsonl"), tokenizer).stream.tolist())

    threads = []
    for tokenizer in tokenizers:
        threads.append(threading.Thread(target=process, args=(tokenizer,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [want] * 4
    assert [tokenizer.documents for tokenizer in tokenizers] == [50] * 4


def test_log_says_which_hosts_do_the_same_work(folder, monkeypatch, caplog):
    write_documents(folder)
    monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", 0)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    for num_processes, num_messages in ((1, 0), (64, 1), (64, 1)):
        monkeypatch.setattr(jax, "process_count", lambda n=num_processes: n)
        documents = json_lines_dataset(f"[0-{min(num_processes, 3)}].jsonl")
        with caplog.at_level("INFO", "weft.input.file_cache"):
            tokenize_documents(documents, Letters())
        messages = [m for m in caplog.messages if "do the same work again" in m]
        assert len(messages) == num_messages, "it is cached the last time"
    assert "tokenizing 200 documents" in messages[0]
    assert "Of 64 processes in all" in messages[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a bad word"}', r"line 2 of a\.jsonl cannot be tokenized: ValueError: no such"),
        (
            '{"words": 1, "id": 2}',
            r"line 2 of a\.jsonl: .*no 'text', it has \['id', 'words'\]; name",
        ),
        ('{"text": [1]}', r"line 2 of a\.jsonl: 'text' of the record is of type list; expected a"),
        ("[1]", r"line 2 of a\.jsonl: the record is of type list; expected a dict with 'text'"),
        ('{"text": 1', r"a\.jsonl, line 2, column 11: Expecting"),
    ],
    ids=["tokenizer", "key", "type", "list", "json"],
)
def test_invalid_document_is_named(folder, line, message):
    (folder / "a.jsonl").write_text(
        '{"text": "good"}\n' + line + '\n{"text": "good"}', encoding="utf-8"
    )
    with pytest.raises(InputReadError, match=message):
        tokenize_documents(json_lines_dataset("a.jsonl"), Words())


def test_no_documents(folder):
    (folder / "a.jsonl").touch()
    with pytest.raises(
        EmptyCorpusError, match=r"\(0 records in 1 files\)\) has no documents; pass"
    ):
        tokenize_documents(json_lines_dataset("a.jsonl"), Words())


@pytest.fixture
def cache(folder):
    return folder / "cache"


def test_cache_folder_of_user(monkeypatch, cache):
    assert cache_folder() == cache / "weft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(cache_folder()) == "/home/someone/.cache/weft"


@pytest.mark.parametrize("num_bytes", [3, None, 10**9], ids=str)
def test_large_data_is_cached_small_data_stays_in_memory(cache, num_bytes):
    calls = []

    def make(out):
        calls.append(out)
        out.write(b"a")
        out.write(b"bc")

    for _ in range(2):
        assert cached_bytes("kind", ("key", 1), make, num_bytes=num_bytes).tobytes() == b"abc"
    is_large = num_bytes != 3
    assert len(calls) == (1 if is_large else 2)
    assert isinstance(cached_bytes("kind", ("key", 1), make, num_bytes=None), np.memmap)
    cached_bytes("kind", ("key", 2), make, num_bytes=None)
    assert len(list((cache / "weft" / "kind").glob("*.lock"))) == 2


def test_memmap_is_pickled_by_file_name():
    numbers = np.arange(10_000, dtype=np.int32)
    made = cached_bytes("kind", "numbers", lambda out: out.write(numbers.tobytes()), num_bytes=None)
    made = made.view(np.int32)
    data = pickle.dumps(made)
    assert len(data) < 500
    np.testing.assert_array_equal(pickle.loads(data), numbers)
    # Derived arrays are pickled by value.
    for part in (made[5:9], made[::2], made + 1):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(part)), part)
    with pytest.raises(ValueError, match="read-only"):
        made[0] = 1


def _flip(data):
    return data[:1] + bytes([data[1] ^ 1]) + data[2:]


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: bytes(len(data)),
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: data[: len(data) // 2] + data[-len(data) // 2 + 8 :],
    ],
    ids=["flipped", "cut", "half", "zeroed", "empty", "longer", "eight bytes lost"],
)
def test_damaged_data_is_made_again(cache, damage, caplog):
    """Damaged caches of tokens were trained on."""
    numbers = np.arange(100, dtype=np.int64)

    def make(out):
        out.write(numbers.tobytes())

    cached_bytes("kind", "key", make, num_bytes=None)
    (file,) = (p for p in (cache / "weft" / "kind").iterdir() if not p.suffix)
    file.write_bytes(damage(file.read_bytes()))
    made = cached_bytes("kind", "key", make, num_bytes=None)
    np.testing.assert_array_equal(made.view(np.int64), numbers)
    assert f"{file} is damaged" in caplog.text


def test_links_in_the_cache_are_replaced(cache, tmp_path):
    def make(out):
        out.write(b"mine")

    cached_bytes("kind", "key", make, num_bytes=None)
    (tmp_path / "victim").write_text("private", encoding="utf-8")
    (file,) = (p for p in (cache / "weft" / "kind").iterdir() if not p.suffix)
    file.unlink()
    file.symlink_to(tmp_path / "victim")
    assert cached_bytes("kind", "key", make, num_bytes=None).tobytes() == b"mine"
    file.unlink()
    file.with_suffix(".lock").unlink()
    file.with_suffix(".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(InputReadError, match=r"\.lock' is a symbolic link"):
        cached_bytes("kind", "key", make, num_bytes=None)
    assert (tmp_path / "victim").read_text(encoding="utf-8") == "private"


def test_failure_leaves_no_file(cache):
    def make(out):
        out.write(b"half")
        raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        cached_bytes("kind", "key", make, num_bytes=None)
    assert [p.suffix for p in (cache / "weft" / "kind").iterdir()] == [".lock"]
    whole = cached_bytes("kind", "key", lambda out: out.write(b"whole"), num_bytes=None)
    assert whole.tobytes() == b"whole"


def test_unwritable_folder(cache, monkeypatch):
    cache.mkdir()
    (cache / "file").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    with pytest.raises(
        InputReadError, match=r"cannot write \S+/file/weft/kind/\w+ .*set XDG_CACHE_HOME to a"
    ):
        cached_bytes("kind", "key", lambda out: None, num_bytes=None)


def test_full_disk_raises():
    def make(out):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(InputReadError, match=r"\(No space left on device\); make the folder"):
        cached_bytes("kind", "key", make, num_bytes=None)


def test_second_process_waits_for_the_first(cache):
    program = """
        from weft.input.file_cache import cached_bytes
        def make(out):
            print("making", flush=True)
            input()
            out.write(b"by the other process")
        cached_bytes("kind", "key", make, num_bytes=None)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "making\n"
        made = []
        waiting = threading.Thread(
            target=lambda: made.append(
                cached_bytes("kind", "key", lambda out: out.write(b"mine"), num_bytes=None)
            )
        )
        waiting.start()
        waiting.join(timeout=0.3)
        assert waiting.is_alive() and not made
        other.communicate("\n", timeout=60)
        waiting.join(timeout=60)
    assert made[0].tobytes() == b"by the other process"
    assert other.returncode == 0


def test_limit_is_a_number_of_bytes():
    assert file_cache.MAX_BYTES_IN_MEMORY == 64 * 2**20


def test_empty_data_is_cached():
    assert cached_bytes("kind", "empty", lambda out: None, num_bytes=None).tobytes() == b""
    assert cached_bytes("kind", "empty", lambda out: None, num_bytes=0).tobytes() == b""
