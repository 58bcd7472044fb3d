"""The record of a model's class names what a later command imports, and nothing else."""

import hashlib
from pathlib import Path

import pytest

from weft import hierarchy, linen, nnx
from weft.config import InMemory, config_for_class
from weft.trainer.model_record import model_record


class Own(nnx.Module):
    class Part(nnx.Module):
        pass


@pytest.mark.parametrize(
    "model", [Own(), Own, config_for_class(Own)], ids=["object", "class", "config"]
)
def test_own_class(model):
    file = Path(__file__)
    assert model_record(model) == {
        "name": f"weft.fit with {__name__}.Own",
        "function": f"{__name__}:Own",
        "file": str(file),
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "neighbors": {},
        "words": None,
    }


def test_class_in_a_class_is_found_by_the_outer_one():
    record = model_record(Own.Part)
    assert record is not None
    assert record["function"] == f"{__name__}:Own"


def test_what_a_text_cannot_name_or_need_not():
    class Local(linen.Module):
        pass

    weft_layers = linen.Dense(2), nnx.Linear, hierarchy.Linear.default_config()
    for model in (*weft_layers, Local(), InMemory(object(), "an object")):
        assert model_record(model) is None
