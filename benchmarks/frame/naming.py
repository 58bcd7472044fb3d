"""Library of a line, read from its name."""

import re

FAMILIES = ("Weft", "Flax", "Equinox", "Haiku", "raw JAX")
_LIBRARY = re.compile(rf", ((?:{'|'.join(FAMILIES)})\b[^/]*?)(?= / |$)")


def family(name: str) -> str:
    """Returns the library that a line is of: "Weft" of "Weft NNX, cached_partial"; or the name
    itself.
    """
    return next((known for known in FAMILIES if re.match(rf"{known}\b", name)), name)


def library(question: str) -> tuple[str, str]:
    """Returns a question without its library, and the library: Weft where none is named."""
    if named := _LIBRARY.search(question):
        return question[: named.start()] + question[named.end(1) :], named[1]
    return question, "Weft"
