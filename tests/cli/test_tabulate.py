"""The table of a model, against sizes worked out by hand."""

from weft.cli import main

DIM, VOCAB, LAYERS, FFN, LENGTH = 24, 264, 2, 64, 32


def table(capsys, *overrides):
    assert main(["tabulate", "lm-tiny", *overrides]) == 0
    return capsys.readouterr().out.splitlines()


def test_modules_parameters_shapes_and_operations_are_shown(capsys):
    lines = table(capsys)
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert lines[0].split() == [
        "module",
        "class",
        "parameters",
        "FLOPs",
        "shape",
        "dtype",
        "layout",
    ]
    embedding = VOCAB * DIM
    assert rows["token_emb"][:2] == ["Embedding", f"{embedding:,}"]
    logits = 2 * LENGTH * embedding  # the embedding is looked up for nothing, and makes the logits
    assert rows["token_emb"][2] == f"{logits / 1e3:.1f}k"
    weight = next(i for i, line in enumerate(lines) if line.split()[0] == "linear2") + 1
    products = 2 * LENGTH * LAYERS * FFN * DIM
    expected = ["weight", f"{LAYERS * FFN * DIM:,}", f"{products / 1e3:.1f}k"]
    expected += ["(2,", "64,", "24)", "float32", "(-,", "model,", "-)"]
    assert lines[weight].split() == expected
    total = rows["model"][1]
    assert any(line.startswith(f"{total} parameters, ") for line in lines)


def test_no_arrays_are_created(capsys, monkeypatch):
    import jax

    def refuse(*args, **kwargs):
        raise AssertionError("a parameter was drawn")

    for draw in ("normal", "uniform", "truncated_normal"):
        monkeypatch.setattr(jax.random, draw, refuse)
    assert table(capsys)


def test_state_is_separate_from_parameters(capsys):
    assert main(["tabulate", "digits", "model.features=(4,)"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert rows["model"][0] == "LibraryModel"
    assert rows["batch_stats"] == ["8"]
    parameters = 4 * 9 + 2 * 4 + 4 * 4 * 4 * 10 + 10
    assert any(
        line.startswith(f"{parameters} parameters, and 8 values of state, ") for line in lines
    )
    assert "products of activations" not in "".join(lines)
