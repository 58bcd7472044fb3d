"""Random graphs of NNX objects under nested transformations, against the same on dicts of arrays.

Objects share variables and each other, and are met at several places; the program and both of its
interpretations are those of `tests/nnx/transforms/test_properties.py`.
"""

from hypothesis import strategies as st

from tests.nnx.transforms import test_properties as properties

BY_NAME = {f.__name__: f for f in (*properties.TRANSFORMATIONS, properties.while_loop)}
# What a gradient goes through has no loop of unknown length.
inner = st.lists(st.sampled_from([f.__name__ for f in properties.TRANSFORMATIONS]), max_size=2)
WHILE = ("jit", "cond", "scan", "remat", "vmap")
with_while = st.lists(st.sampled_from(WHILE), max_size=2).map(lambda names: ["while_loop", *names])
CASES = st.tuples(properties.cases(), inner | with_while)
SHORT = 4


def check(case: tuple[properties.Case, list[str]]) -> None:
    graph, names = case
    properties.check(graph, [BY_NAME[name] for name in names])


def source(case: tuple[properties.Case, list[str]]) -> str:
    return (
        "from tests.fuzz.fuzz_nnx import check\n"
        "from tests.nnx.transforms.test_properties import Case\n\n"
        f"check({case!r})\n"
    )
