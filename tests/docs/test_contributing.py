"""The contributing guide names files that exist and the frames that calls have.

Its programs run in test_docs.py.
"""

import re
import sys

import numpy as np
import pytest

from tests.house import call_paths
from tests.interop.huggingface import test_checkpoint as checkpoints
from tests.pages import ROOT, run_in_order
from weft.interop.huggingface import checkpoint

GUIDE = ROOT / "docs" / "contributing"
PAGES = [ROOT / "CONTRIBUTING.md", *sorted(GUIDE.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_files_exist(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    named = set(re.findall(r"`((?:weft|tests|docs|benchmarks|examples)/[\w./-]+)`", text))
    files = [path for path in named if "NAME" not in path and "NNNN" not in path]
    assert files
    assert sorted(path for path in files if not (ROOT / path).exists()) == []


def sections():
    """Returns the tables of frames by the heading above them."""
    text = (GUIDE / "index.md").read_text(encoding="utf-8")
    return {
        part.splitlines()[0].replace("`", ""): re.findall(r"^\| `(.*?)` \| `(.*?)` \|", part, re.M)
        for part in re.split(r"^### ", text, flags=re.M)[1:]
    }


def test_frames_are_those_of_the_calls():
    documented = sections()
    name = "SpmdTrainer.run to the model's forward"
    assert documented.pop(name) == call_paths.trainer()[0]
    found = dict(call_paths.paths())
    assert documented == {name: found[name] for name in documented}
    assert len(documented) == 4


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_family_of_the_guide_has_the_logits_of_transformers(transformers, monkeypatch, tmp_path):
    import torch

    monkeypatch.chdir(tmp_path)
    run_in_order(GUIDE / "family.md", monkeypatch)
    family = vars(sys.modules["__main__"])["STARCODER2"]
    monkeypatch.setitem(checkpoint.FAMILIES, "starcoder2", family)
    torch.manual_seed(0)
    config = transformers.Starcoder2Config(**checkpoints.GROUPED)
    model = transformers.Starcoder2ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    model.save_pretrained("theirs")
    read = checkpoints.from_huggingface("theirs")
    wanted = checkpoints.logits_of(model, checkpoints.IDS)
    np.testing.assert_allclose(checkpoints.logits(*read), wanted, atol=1e-4)


transformers = checkpoints.transformers
