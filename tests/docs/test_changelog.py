"""The changelog says each change once, under headings that read the same on the site."""

import itertools
import re

from tests.pages import ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def repeated(entries):
    """Returns the entries most of whose pairs of words stand in another entry, too."""
    words = {entry: re.findall(r"\w+", entry.lower()) for entry in entries}
    pairs = [(entry, set(itertools.pairwise(words[entry]))) for entry in entries]
    return [
        min(a, b, key=len)
        for (a, in_a), (b, in_b) in itertools.combinations(pairs, 2)
        if len(in_a & in_b) > 0.6 * min(len(in_a), len(in_b))
    ]


def test_an_extended_entry_repeats_the_shorter_one():
    entry = "Checkpoints of T5, in and out. `EncoderDecoderModel` is its model."
    longer = entry.replace("out.", "out, and adapters on them.")
    other = "Checkpoints of BERT, in and out. `MaskedLanguageModel` is its model."
    assert repeated([entry, other, longer]) == [entry]


def test_no_entry_of_a_release_stands_twice():
    for release in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE):
        assert repeated(re.findall(r"^- (.*)", release, re.MULTILINE)) == []


def test_headings_have_no_brackets_that_the_site_would_show():
    assert re.findall(r"^#+ .*\[.*", CHANGELOG, re.MULTILINE) == []
