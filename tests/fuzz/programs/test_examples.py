"""Small programs that Weft once got wrong."""

import dataclasses

import pytest

from tests.fuzz.fuzz_programs import WAYS, check, most_traces
from tests.fuzz.programs.ir import COLLECTIONS, Block, Draw, Level, Program, Role, Use

COUNT = Use("st", "c", write="count")
PARAM = Use("params", "c")
KEYED = Use("params", "k", first="key")


def roles(st: Role, params: Role = None) -> tuple[tuple[str, Role], ...]:
    return (("params", params), ("st", st), ("cache", "carry"))


def scan(st: Role, *body, size=2, scope="a", params: Role = None):
    return Level("scan", Block(body), scope=scope, size=size, roles=roles(st, params))


def loop(kind, *body, size=2):
    return Level(kind, Block(body), size=size, roles=roles("carry"))


LAYERS = scan(0, COUNT)
EXAMPLES = {
    # State created and changed under an axis started with its last value.
    "scan around a scan with an axis": (scan("carry", LAYERS, size=1, scope="b"),),
    "a scan of none around a scan with an axis": (scan("carry", LAYERS, size=0, scope="b"),),
    "while around a scan with an axis": (loop("while", LAYERS),),
    "fori around a scan with an axis": (loop("fori", LAYERS),),
    "fori around vmap": (loop("fori", dataclasses.replace(LAYERS, kind="vmap")),),
    "a branch not taken around a scan with an axis": (
        Level("cond", Block((LAYERS,)), taken=1, others=(Block(),)),
    ),
    "the last branch of three around a scan with an axis": (
        Level("switch", Block((LAYERS,)), taken=2, others=(Block(), Block())),
    ),
    # Loops inside of a loop that shares parameters were refused.
    "fori in fori under shared parameters": (
        scan("carry", PARAM, loop("fori", loop("fori", COUNT, PARAM))),
    ),
    "fori under shared parameters": (scan("carry", PARAM, loop("fori", COUNT, PARAM)),),
    "while under shared parameters": (scan("carry", PARAM, loop("while", COUNT, PARAM)),),
    "while, jit and cond under shared parameters": (
        scan(
            "carry",
            loop(
                "while",
                Level("jit", Block((Level("cond", Block((COUNT, PARAM)), others=(Block(),)),))),
            ),
        ),
    ),
    # State of a single branch differed between indices, since the taken branch does.
    "vmap of a cond by the index, around what all share": (
        Level(
            "vmap",
            Block((Level("cond", Block((Use("cache", "c"),)), taken=None, others=(Block(),)),)),
            scope="a",
            roles=(("params", None), ("st", 0), ("cache", None)),
        ),
    ),
    "vmap of a cond by the index, around a cond and what all share": (
        Level(
            "vmap",
            Block(
                (
                    Level(
                        "cond",
                        Block((Level("cond", Block((Use("cache", "c"),)), others=(Block(),)),)),
                        taken=None,
                        others=(Block(),),
                    ),
                )
            ),
            scope="a",
            roles=(("params", None), ("st", 0), ("cache", None)),
        ),
    ),
    # Bodies were traced 2 ** d times.
    "three scans that carry what is made": (
        scan("carry", scan("carry", scan("carry", COUNT, scope="c"), scope="b")),
    ),
    "scans, a while and a fori that carry what is made": (
        scan("carry", loop("while", loop("fori", scan("carry", COUNT, Draw(), scope="b")))),
    ),
    # State with an axis is missing in each trace of the outer loop.
    "a fori that carries in a scan that has an axis and carries": (
        scan(0, loop("fori", COUNT, Use("cache", "c")), params=0),
    ),
    # The first key after a loop equaled the key of a parameter created in its body.
    "a parameter made with a key in fori": (loop("fori", KEYED),),
    "a parameter made with a key in while": (loop("while", KEYED),),
    "a parameter made with a key in while in fori": (loop("fori", loop("while", KEYED)),),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_the_python_loop(name, way):
    check(Program(way, Block(EXAMPLES[name]), dropped=("st",)))


def test_most_traces_of_loops():
    carrying = (loop("while"),) * 4
    assert [most_traces(carrying[:d], frozenset()) for d in range(5)] == [1, 2, 3, 4, 5]
    assert most_traces(carrying, frozenset(COLLECTIONS)) == 1
    axis_outside = (scan(0), *carrying[:1])
    assert most_traces(axis_outside, frozenset()) == 4
    assert most_traces(axis_outside, frozenset({"params", "cache"})) == 2
