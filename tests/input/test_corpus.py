import bz2
import gzip
import json
import lzma
import math
import os
import sysconfig

import pytest

from weft.errors import CorpusReadError, EmptyCorpusError, InputReadError
from weft.input.corpus import (
    Corpus,
    TextFile,
    folder_corpus,
    ngram_baselines,
    stdlib_corpus,
)
from weft.input.datasets import json_lines_dataset, text_dataset


@pytest.fixture(scope="module")
def stdlib():
    return stdlib_corpus()


def test_stdlib_is_a_few_hundred_files_of_about_ten_megabytes(stdlib):
    names = [file.name for file in stdlib.files]
    assert 400 < len(names) < 800
    assert 8e6 < stdlib.num_bytes("train") + stdlib.num_bytes("held_out") < 14e6
    assert names == sorted(set(names))
    assert {"json/decoder.py", "pydoc_data/topics.py", "typing.py"} <= set(names)
    for part in ("test", "tests", "site-packages", "idlelib"):
        assert not any(part in name.split("/")[:-1] for name in names)
    assert stdlib.name == f"stdlib-{sysconfig.get_python_version()}"


def test_split_is_by_name_and_near_the_fraction(stdlib):
    train = {f.name for f in stdlib.split("train")}
    held_out = {f.name for f in stdlib.split("held_out")}
    assert not train & held_out
    assert train | held_out == {f.name for f in stdlib.files}
    assert 0.05 < len(held_out) / len(stdlib.files) < 0.16
    # Editing one file and adding another moves no other file.
    files = (*stdlib.files[1:], TextFile("new.py", b"x"), TextFile(stdlib.files[0].name, b""))
    changed = {f.name for f in Corpus("changed", files).split("held_out")}
    assert changed - {"new.py"} == held_out


def test_name_that_is_not_in_utf8(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"a text\n" * 50)
    corpus = folder_corpus(str(tmp_path))
    assert corpus.num_bytes("train") + corpus.num_bytes("held_out") == 350
    assert corpus.record()["files"] == 1


def test_hash_covers_names_and_bytes_but_not_order():
    a, b = TextFile("a", b"one"), TextFile("b", b"two")
    original = Corpus("c", (a, b)).sha256
    assert Corpus("c", (b, a)).sha256 == original
    others = [
        (a,),
        (a, TextFile("b", b"twO")),
        (a, TextFile("B", b"two")),
        (TextFile("a", b"onetwo"), TextFile("b", b"")),
        (TextFile("ao", b"ne"), b),
    ]
    hashes = {Corpus("c", files).sha256 for files in others}
    assert len(hashes) == len(others)
    assert original not in hashes


def test_folder_patterns_and_excludes(tmp_path):
    for name in ("a.md", "b.txt", "deep/c.md", "skip/d.md", "deep/skip/e.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")

    def names(**kwargs):
        return [f.name for f in folder_corpus(str(tmp_path), **kwargs).files]

    assert names(pattern="**/*.md", exclude=["skip"]) == ["a.md", "deep/c.md"]
    assert names(pattern="deep/*.md") == ["deep/c.md", "deep/skip/e.md"]
    assert names(pattern="*.txt") == ["b.txt"]
    assert len(names()) == 5


def test_empty_corpus_names_the_folder_and_the_pattern(tmp_path):
    (tmp_path / "empty.py").touch()
    with pytest.raises(EmptyCorpusError, match=r"1 files match '\*.py' in .*, with 0 bytes") as e:
        folder_corpus(str(tmp_path), pattern="*.py")
    assert str(tmp_path) in str(e.value)
    with pytest.raises(
        EmptyCorpusError, match=r"0 files match '\*\*/\*' in .*no/such does not exist"
    ):
        folder_corpus(str(tmp_path / "no/such"))
    with pytest.raises(EmptyCorpusError, match=r"0 files match '\*.nothing'"):
        stdlib_corpus(pattern="*.nothing")


def test_empty_part_names_the_fraction():
    corpus = Corpus("tiny", (TextFile("3.py", b"x"),), held_out_fraction=0.1)
    with pytest.raises(EmptyCorpusError, match=r"'tiny': none of its 1 files .* 'held_out' .*0\.1"):
        corpus.split("held_out")


def test_unreadable_file_is_reported(tmp_path, monkeypatch):
    (tmp_path / "locked.txt").write_text("x", encoding="utf-8")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("weft.input.formats.open_file", refuse)
    with pytest.raises(
        CorpusReadError, match=r"locked\.txt \(Permission denied\); make it readable"
    ):
        folder_corpus(str(tmp_path))


def test_two_files_of_one_name_are_rejected(tmp_path):
    for name in ("a/src/x.py", "b/src/x.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x", encoding="utf-8")
    with pytest.raises(CorpusReadError, match=r"two files .* are named 'src/x.py'.*common parent"):
        folder_corpus([str(tmp_path / "a/src"), str(tmp_path / "b/src")])


def test_records_of_files_are_documents(tmp_path):
    lines = [json.dumps({"text": f"é{i}", "body": "b"}) for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:20]), encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[20:]).encode()))
    (tmp_path / "c.txt").write_text("plain", encoding="utf-8")
    corpus = folder_corpus(str(tmp_path), held_out_fraction=0.3)
    assert [f.name for f in corpus.files[18:22]] == [
        *("a.jsonl#0000018", "a.jsonl#0000019", "b.jsonl.gz#0000000", "b.jsonl.gz#0000001")
    ]
    texts = [f.text.decode() for f in corpus.files]
    assert texts == [*(f"é{i}" for i in range(30)), "plain"]
    assert len(corpus.split("held_out")) > 3
    other = folder_corpus([str(tmp_path / "a.jsonl")], text_key="body")
    assert {f.text for f in other.files} == {b"b"}
    with pytest.raises(InputReadError, match=r"line 1 of \S+a\.jsonl: the record has no 'words'"):
        folder_corpus(str(tmp_path), text_key="words")


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.jsonlines", "a.json", "A.JSONL", "a.jsonl.gz", "a.NDJSON.GZ"]
)
@pytest.mark.parametrize(
    "data",
    [
        b'{"text": "one"}\n{"text": "two"}\n',
        b'\xef\xbb\xbf{"text": "one"}\r\n   \r\n\r\n{"text": "two"}\r\n\t',
        b'[{"text": "one"}, {"text": "two"}]',
        b'[\r\n  {"text": "one"},\r\n  {"text": "two"}\r\n]\r\n',
    ],
    ids=["lines", "Windows", "array", "array in lines"],
)
def test_json_as_people_have_it(tmp_path, name, data):
    folder = tmp_path / "data [v1]*?"
    folder.mkdir()
    packed = gzip.compress(data) if name.lower().endswith(".gz") else data
    (folder / name).write_bytes(packed)
    corpus = folder_corpus(str(folder), held_out_fraction=0.0)
    assert [file.text for file in corpus.files] == [b"one", b"two"]
    texts = json_lines_dataset(str(folder / "*"))
    assert [record["text"] for record in texts] == ["one", "two"]
    with pytest.raises(InputReadError, match="is read with json_lines_dataset, not with text_data"):
        text_dataset(str(folder / name))


def test_text_as_people_have_it(tmp_path):
    (tmp_path / "A.TXT").write_bytes(b"\xef\xbb\xbfone\r\n")
    (tmp_path / "b.txt.GZ").write_bytes(gzip.compress(b"two\n"))
    corpus = folder_corpus(str(tmp_path), held_out_fraction=0.0)
    assert [file.text for file in corpus.files] == [b"one\r\n", b"two\n"]
    texts = text_dataset([str(tmp_path / "A.TXT"), str(tmp_path / "b.txt.GZ")])
    assert [record["text"] for record in texts] == [b"one\r\n", b"two\n"]
    lines = text_dataset(str(tmp_path / "*"), document="line")
    assert [record["text"] for record in lines] == [b"one", b"two"]


@pytest.mark.parametrize("name", ["a.csv", "a.TSV.gz", "a.docx", "a.npz"])
def test_other_formats_are_not_learnt_as_text(tmp_path, name):
    (tmp_path / name).write_bytes(b"text,label\nhello,1\n")
    for read in (folder_corpus, lambda path: text_dataset(f"{path}/*")):
        with pytest.raises(
            InputReadError, match=r"file, a format that is not read: .*JSON lines or Parquet"
        ):
            read(str(tmp_path))
    (tmp_path / "b.txt").write_bytes(b"text")
    assert len(folder_corpus(str(tmp_path), exclude=[name]).files) == 1


def test_json_that_is_damaged(tmp_path):
    (tmp_path / "a.json").write_bytes(b'[\n{"text": "one"},\n{"text": "tw')
    with pytest.raises(InputReadError, match=r"a\.json begins like one JSON array.*line 3 column"):
        folder_corpus(str(tmp_path))
    (tmp_path / "a.json").write_bytes(b'{\n"name": "package",\n"version": 1\n}')
    with pytest.raises(
        InputReadError, match=r"record 0 of .*a\.json: the record has no 'text', it"
    ):
        folder_corpus(str(tmp_path))
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputReadError, match=r"the record is empty; expected one with 'text'"):
        folder_corpus(str(tmp_path))


def test_rows_of_parquet_files_are_documents(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    import pyarrow as pa

    parquet.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    corpus = folder_corpus(str(tmp_path))
    assert [f.text for f in corpus.files] == [b"one", b"two"]


BINARY = {
    "gzip": (
        gzip.compress(b"text"),
        "gzip data begins at byte 0; unpack it first, for example with `gunzip <old >new`",
    ),
    "bzip2": (
        bz2.compress(b"text"),
        "bzip2 data begins at byte 0; unpack it first, for example with `bunzip2 <old >new`",
    ),
    "xz": (
        lzma.compress(b"text"),
        "xz data begins at byte 0; unpack it first, for example with `unxz <old >new`",
    ),
    "zip": (
        b"PK\x03\x04rest",
        "zip data begins at byte 0; unpack it first, for example with `unzip`",
    ),
    "zstd": (
        b"\x28\xb5\x2f\xfdrest",
        "zstd data begins at byte 0; unpack it first, for example with `unzstd <old >new`",
    ),
    "NUL": (b"some text\0 and more", "byte 9 is 0, as in binary files"),
    "latin": ("text né".encode("latin-1"), r"in UTF-8: byte 6 is 0xe9 .*iconv"),
    "UTF-16": (
        "text".encode("utf-16"),
        "in UTF-16; convert it, .*`iconv -f UTF-16 -t UTF-8 <old >new`",
    ),
}


@pytest.mark.parametrize(("data", "message"), BINARY.values(), ids=BINARY)
def test_binary_files_are_rejected(tmp_path, data, message):
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(data)
    with pytest.raises(
        CorpusReadError, match=rf"b\.txt is not text.*{message}.*leave the file out"
    ):
        folder_corpus(str(tmp_path))
    assert len(folder_corpus(str(tmp_path), exclude=["b.txt"]).files) == 1
    for document in ("file", "line"):
        documents = text_dataset(str(tmp_path / "*"), document=document)
        assert documents[0] == {"text": b"text"}
        with pytest.raises(InputReadError, match=rf"b\.txt is not text.*{message}"):
            [documents[i] for i in range(len(documents))]


@pytest.mark.parametrize("text", ["", "BZh is not all", "PKZIP", "né ✓ \x1b[0m\r\n\t\f", "%PDF"])
def test_nearly_binary_text_is_accepted(tmp_path, text):
    (tmp_path / "a.txt").write_bytes(b"x" * (not text) + text.encode())
    assert folder_corpus(str(tmp_path)).files[0].text.decode().endswith(text)


def test_fifo_does_not_block(tmp_path):
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    os.mkfifo(tmp_path / "b.txt")
    assert [file.name for file in folder_corpus(str(tmp_path)).files] == ["a.txt"]


def test_standard_library_baselines_are_realistic():
    result = ngram_baselines(stdlib_corpus())
    nats = [result[name].nats_per_token for name in ("unigram", "bigram", "trigram")]
    # It differs by Python version; random bytes would be at 5.5.
    assert nats == pytest.approx([3.24, 2.41, 1.74], abs=0.1)
    for baseline in result.values():
        assert baseline.bits_per_byte == pytest.approx(
            baseline.nats_per_token / math.log(2), rel=1e-3
        )
    assert result["trigram"].order == 3
    assert result["trigram"].name == "trigram"


def test_eos_adds_loss_but_no_bytes():
    # Files 1 and 2 are held out.
    files = tuple(TextFile(f"{i}.py", b"ab" * 5) for i in range(8))
    result = ngram_baselines(Corpus("small", files))
    targets, num_bytes = 2 * 11, 2 * 10
    for baseline in result.values():
        nats = baseline.bits_per_byte * math.log(2) * num_bytes
        assert nats == pytest.approx(baseline.nats_per_token * targets)


def test_max_train_bytes():
    corpus = stdlib_corpus(pattern="[a-d]*.py")
    full, cut = ngram_baselines(corpus), ngram_baselines(corpus, max_train_bytes=2000)
    assert cut["trigram"].nats_per_token > full["trigram"].nats_per_token


def test_empty_held_out_part_fails():
    with pytest.raises(EmptyCorpusError, match="'held_out'"):
        ngram_baselines(Corpus("one", (TextFile("3.py", b"text"),), held_out_fraction=0.0))


def test_ends_of_a_few_files_are_held_out():
    text = "".join(f"Zeile {i}: Äpfel, Öl\n" for i in range(50)).encode()
    one_line = "ä".encode() * 50
    corpus = Corpus("few", (TextFile("a", text), TextFile("b", one_line), TextFile("c", b"")), 0.11)
    train, held_out = corpus.split("train"), corpus.split("held_out")
    assert [f.name for f in train] == [f.name for f in held_out] == ["a", "b"]
    assert [x.text + y.text for x, y in zip(train, held_out, strict=True)] == [text, one_line]
    assert all(file.text.decode() for file in (*train, *held_out))
    assert train[0].text.endswith(b"\n") and len(train[1].text) == 90
    assert corpus.num_bytes("held_out") / len(text + one_line) == pytest.approx(0.11, abs=0.02)


def test_bomb_in_a_gzipped_text_is_not_unpacked(tmp_path):
    with gzip.GzipFile(tmp_path / "a.txt.gz", "wb", compresslevel=1) as file:
        for _ in range(5):
            file.write(b"a" * 2**24)
    why = r"cannot read .*a\.txt\.gz \(it becomes larger than 7.,...,... bytes; unpack it yourself"
    with pytest.raises(CorpusReadError, match=why):
        folder_corpus([str(tmp_path)])
