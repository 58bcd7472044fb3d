"""`weft sample` and `weft chat` on the folder of a tiny Llama, which needs no run."""

import io
import re
import subprocess
import sys

import pytest

import weft
from weft.cli import main
from weft.serialization.untrusted import printable

pytestmark = pytest.mark.usefixtures("one_device")


def test_folder_is_sampled_as_in_python(folder, generator, capsys):
    options = ["--tokens=12", "--top-k=20", "--top-p=0.9", "--seed=3"]
    assert main(["sample", str(folder), "--prompt", "to be", *options]) == 0
    whole = capsys.readouterr()
    settings = {"tokens": 12, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3}
    (completion,) = generator.generate("to be", **settings)
    assert whole.out == f"to be{printable(completion.text)}\n"
    assert re.search(r"\[\d+ tokens in .* s, .* tokens/s\]", whole.err)
    assert main(["sample", str(folder), "--prompt", "to be", *options, "--stream"]) == 0
    assert capsys.readouterr().out == whole.out


def test_prompts_of_a_file_are_continued(folder, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("to be\n\nthe question\n", encoding="utf-8")
    assert main(["sample", str(folder), "--prompt-file", str(path), "--n=2", "--tokens=3"]) == 0
    titles = re.findall("^--- (.*)", capsys.readouterr().out, re.MULTILINE)
    assert titles == [f"prompt {i}, sample {j}" for i in (1, 2) for j in (1, 2)]


def test_weights_in_int8_are_those_of_python(folder, capsys):
    options = ["--prompt=to be", "--tokens=4", "--temperature=0", "--weights=int8"]
    assert main(["sample", str(folder), *options]) == 0
    text = capsys.readouterr().out
    (completion,) = weft.generate(folder, "to be", tokens=4, temperature=0, weights="int8")
    assert text == f"to be{printable(completion.text)}\n"
    assert main(["chat", str(folder), "--weights=int4"]) == 2
    assert "argument --weights: invalid choice: 'int4'" in capsys.readouterr().err


def test_chat_has_a_history(folder, generator, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("to be?\n\nor not?\n/reset\nto be?\n/exit\nx\n"))
    arguments = ["--tokens=8", "--temperature=0", "--system", "suffer"]
    assert main(["chat", str(folder), *arguments]) == 0
    messages = [{"role": "system", "content": "suffer"}]
    answers = []
    for question in ("to be?", "or not?"):
        messages.append({"role": "user", "content": question})
        (answer,) = generator.generate(messages, tokens=8, temperature=0)
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(printable(answer.text))
    expected = [*answers, answers[0]]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step=3"], "--step chooses a checkpoint of a run, and"),
        (["--stream", "--n=2"], "--stream shows one text, and 2 are to be generated"),
        (["--prompt=a", "--prompt-file=b"], "leave one of them out"),
        (["--prompt-file=missing.txt"], "--prompt-file 'missing.txt' cannot be read"),
        (["--prompt-file={empty}"], "has no prompts; expected one in each line"),
        (["--top-p=2"], "top_p=2; expected more than 0, at most 1"),
        (["--stop="], "stop has an empty text"),
    ],
)
def test_bad_options_are_reported(folder, tmp_path, options, message, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n", encoding="utf-8")
    options = [option.format(empty=empty) for option in options]
    assert main(["sample", str(folder), *options]) == 2
    assert message in capsys.readouterr().err


def test_folder_without_template_or_tokenizer_is_refused(folder, tmp_path, capsys):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (copy / name).write_bytes((folder / name).read_bytes())
    assert main(["chat", str(copy)]) == 2
    assert "has no chat template" in capsys.readouterr().err
    (copy / "tokenizer.json").unlink()
    assert main(["sample", str(copy)]) == 2
    assert "has no tokenizer: neither tokenizer.json nor tokenizer.model" in capsys.readouterr().err


def test_command_starts_without_libraries_of_training_data():
    program = "import sys, weft.cli.sample; sys.exit('grain' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
