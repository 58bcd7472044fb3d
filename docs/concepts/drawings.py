"""Drawings of the pages about concepts: `python -m docs.concepts.drawings` writes SVG files.

Each has two layouts: `NAME.svg` and, for a phone, `NAME-narrow.svg`. The layers of the house are
those of the contract in `pyproject.toml`.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from docs.concepts.drawing import LINE_HEIGHT, Drawing, text_width
from docs.concepts.terms import TERMS

FOLDER = Path(__file__).parent
WIDE, NARROW = 720, 360
GAP = 24
Item = tuple[str, tuple[str, ...]]
"""Kind and lines of a box."""


def height_of(items: Sequence[Item]) -> int:
    """Returns the height of a column."""
    return sum(LINE_HEIGHT * len(lines) + 16 + GAP for _, lines in items) - GAP


def column(
    d: Drawing, x: float, y: float, width: float, items: Sequence[Item]
) -> float:
    """Adds boxes from top to bottom, with an arrow from each to the next; returns the end."""
    for i, (kind, lines) in enumerate(items):
        height = LINE_HEIGHT * len(lines) + 16
        d.box(x, y, width, height, *lines, kind=kind)
        y += height + GAP
        if i < len(items) - 1:
            d.arrow((x + width / 2, y - GAP), (x + width / 2, y))
    return y - GAP


def places(
    wide: bool,
    columns: Sequence[tuple[str, str, Sequence[Item]]],
    faults: Sequence[Item] = (),
) -> Drawing:
    """Returns a drawing of three columns of boxes in regions, one after the other.

    Below them are boxes for what may fail, one for each column.
    """
    failures = "when something fails"
    if wide:
        inner = max(height_of(items) for _, _, items in columns)
        d = Drawing(WIDE, inner + 68 + (124 if faults else 0))
        for i, (label, kind, items) in enumerate(columns):
            x = 12 + 236 * i
            d.region(x, 12, 224, inner + 44, label, kind)
            end = column(d, x + 10, 44, 204, items)
            if i < len(columns) - 1:
                middle = x + 230
                d.arrow(
                    (x + 214, end - 26),
                    (middle, end - 26),
                    (middle, 69),
                    (x + 246, 69),
                )
        if faults:
            d.region(12, inner + 68, 696, 112, failures, "fault")
            for i, (kind, lines) in enumerate(faults):
                d.box(22 + 236 * i, inner + 98, 204, 70, *lines, kind=kind)
        return d
    heights = [height_of(items) + 56 for _, _, items in columns]
    of_faults = 32 + 82 * len(faults) if faults else -GAP
    d = Drawing(NARROW, sum(heights) + GAP * len(columns) + of_faults + 24)
    y = 12
    for i, ((label, kind, items), height) in enumerate(
        zip(columns, heights, strict=True)
    ):
        if i:
            d.arrow((260, y - GAP - 12), (260, y + 44))
        d.region(12, y, 336, height, label, kind)
        column(d, 50, y + 44, 260, items)
        y += height + GAP
    if faults:
        d.region(12, y, 336, of_faults, failures, "fault")
        for i, (kind, lines) in enumerate(faults):
            d.box(50, y + 32 + 82 * i, 260, 70, *lines, kind=kind)
    return d


def crossing(wide: bool) -> Drawing:
    """Draws a transformed function and the four steps around it."""
    carriers = ("plain", ("# your carriers", "a scope, objects or a context"))
    changed = ("plain", ("# the same carriers", "with their new values"))
    split = ("weft", ("# 1  split", "`split_args` · `Kind.split`"))
    merge = ("weft", ("# 2  merge", "`Kind.merge`", "makes fresh carriers"))
    run = (
        "plain",
        ("# 3  your function", "reads and writes", "the fresh carriers"),
    )
    collect = (
        "weft",
        ("# 4  collect", "`Kind.collect`", "finds what has changed"),
    )
    commit = ("weft", ("# 5  commit", "`commit_results` · `Kind.commit`"))
    if wide:
        d = Drawing(WIDE, 440)
        d.region(12, 12, 696, 176, "outside: your call")
        column(d, 28, 44, 240, [carriers, split])
        d.box(452, 44, 240, 52, *changed[1])
        d.box(452, 120, 240, 52, *commit[1], kind="weft")
        d.arrow((572, 120), (572, 96))
        d.arrow((268, 146), (452, 146), dashed=True)
        d.text(360, 136, "~ which carriers", "middle")
        d.text(360, 164, "~ they were", "middle")
        names = "`jit` · `vmap` · `grad` · `scan` · `cond` · `shard_map` …"
        d.box(
            12, 224, 696, 40, f"# the JAX transformation: {names}", kind="jax"
        )
        inside = "inside: `call_pure`, which JAX traces"
        d.region(12, 300, 696, 128, inside, "jax", at=312, anchor="middle")
        for i, item in enumerate((merge, run, collect)):
            d.box(28 + 232 * i, 340, 200, 72, *item[1], kind=item[0])
        d.arrow((228, 376), (260, 376))
        d.arrow((460, 376), (492, 376))
        d.arrow((128, 172), (128, 224), kind="state")
        d.text(
            142,
            211,
            "`PureArgs`: arrays in groups, each with a role, and a static half",
        )
        d.arrow((128, 264), (128, 340), kind="state")
        d.arrow((520, 340), (520, 264), kind="state")
        d.text(
            506,
            287,
            "`PureResults`: what has changed, and a static half",
            "end",
        )
        d.arrow((520, 224), (520, 172), kind="state")
        return d
    d = Drawing(NARROW, 876)
    d.region(12, 12, 336, 184, "outside: your call")
    column(d, 40, 44, 280, [carriers, split])
    d.arrow((180, 172), (180, 260), kind="state")
    d.text(192, 216, "`PureArgs`:")
    d.text(192, 234, "arrays, a static half")
    names = "`jit` · `vmap` · `grad` · `scan` · `cond` …"
    d.box(12, 260, 336, 52, "# the JAX transformation", names, kind="jax")
    d.region(12, 336, 336, 310, "inside: `call_pure`", "jax")
    d.arrow((180, 312), (180, 372), kind="state")
    end = column(d, 40, 372, 280, [merge, run, collect])
    d.arrow((180, end), (180, 728), kind="state")
    d.text(192, 668, "`PureResults`:")
    d.text(192, 686, "changes, a static half")
    d.region(12, 696, 336, 168, "outside again")
    column(d, 40, 728, 280, [commit, changed])
    return d


def scopes(wide: bool) -> Drawing:
    """Draws the tree of scopes of a call."""
    variables = (
        "# variables",
        "`{'params': {`",
        "`  'hidden': {…},`",
        "`  'out': {…}}}`",
    )
    keys = ("# streams of keys", "`{'dropout': key}`")
    root = ("# root scope", "`/`")
    hidden = ("# scope `/hidden`", "`param('kernel')`")
    out = ("# scope `/out`", "`param('kernel')`")
    store = ("# one `VariableStore`", "all collections, and what has changed")
    counts = ("# one `Counts`", "keys drawn, by scope and stream")
    result, changes = (
        ("# result",),
        ("# changes", "the collections", "of `mutable=`"),
    )
    if wide:
        d = Drawing(WIDE, 352)
        d.text(24, 32, "before: dicts and keys")
        d.box(12, 44, 176, 88, *variables, kind="state", left=True)
        d.box(12, 156, 176, 52, *keys, kind="state", left=True)
        d.region(224, 12, 312, 328, "during the call: a tree of scopes", "weft")
        d.box(316, 44, 128, 50, *root, kind="weft")
        d.box(236, 138, 140, 52, *hidden, kind="weft")
        d.box(384, 138, 140, 52, *out, kind="weft")
        for x in (306, 454):
            d.arrow((380, 94), (380, 116), (x, 116), (x, 138))
            d.arrow((x, 190), (x, 220), kind="state")
        d.box(236, 220, 288, 50, *store, kind="state")
        d.box(236, 278, 288, 50, *counts, kind="state")
        d.arrow((188, 69), (316, 69), kind="state")
        d.arrow((188, 182), (206, 182), (206, 69), (316, 69), kind="state")
        d.text(576, 32, "after: dicts again")
        d.box(564, 44, 144, 50, *result, kind="state")
        d.arrow((444, 69), (564, 69), kind="state")
        d.box(564, 211, 144, 68, *changes, kind="state")
        d.arrow((524, 245), (564, 245), kind="state")
        return d
    d = Drawing(NARROW, 672)
    d.text(24, 28, "before: dicts and keys")
    d.box(12, 40, 172, 88, *variables, kind="state", left=True)
    d.box(196, 40, 152, 88, *keys, kind="state", left=True)
    d.region(12, 172, 336, 352, "", "weft")
    d.text(180, 192, "during the call: a tree of scopes", "middle")
    d.arrow((60, 128), (60, 233), (116, 233), kind="state")
    d.arrow((300, 128), (300, 233), (244, 233), kind="state")
    d.box(116, 208, 128, 50, *root, kind="weft")
    d.box(24, 304, 148, 52, *hidden, kind="weft")
    d.box(188, 304, 148, 52, *out, kind="weft")
    for x in (98, 262):
        d.arrow((180, 258), (180, 281), (x, 281), (x, 304))
        d.arrow((x, 356), (x, 388), kind="state")
        d.arrow((x, 524), (x, 592), kind="state")
    d.box(24, 388, 312, 52, *store, kind="state")
    d.box(24, 456, 312, 52, *counts, kind="state")
    d.text(180, 562, "after: dicts again", "middle")
    d.box(24, 592, 148, 68, *result, kind="state")
    d.box(188, 592, 148, 68, *changes, kind="state")
    return d


def objects(wide: bool) -> Drawing:
    """Draws a graph of objects, its description and its values."""
    graphdef = (
        "# `GraphDef`: static, hashable",
        "`0 Pair`",
        "`  a ─ 1 Linear`",
        "`      kernel ─ 2 Param`",
        "`  b ─ NodeRef(1)`",
        "`  calls ─ 3 Variable`",
    )
    state = (
        "# `State`: each variable once",
        "`('a', 'kernel')  f32[2, 2]`",
        "`('calls',)  i32[]`",
    )
    d = Drawing(WIDE, 328) if wide else Drawing(NARROW, 684)
    d.region(12, 12, 304 if wide else 336, 304, "your objects: a graph")
    x = 24 if wide else 40
    d.box(x + 60, 44, 160, 52, "# `Pair`", "the model")
    d.box(x, 144, 180, 52, "# `Linear`", "reached by two paths")
    d.box(x + 196, 144, 84, 52, "# `Variable`", "`i32[]`", kind="state")
    d.box(x, 244, 180, 52, "# `Param`", "`f32[2, 2]`", kind="state")
    for at, label in (96, "`a`"), (148, "`b`"), (208, "`calls`"):
        d.arrow((x + at, 96), (x + at, 144))
        d.text(x + at + 8, 124, label)
    d.arrow((x + 96, 196), (x + 96, 244))
    d.text(x + 104, 224, "`kernel`")
    if wide:
        d.box(440, 20, 268, 124, *graphdef, left=True)
        d.box(440, 184, 268, 70, *state, kind="state", left=True)
        d.arrow((316, 82), (440, 82), kind="weft")
        d.text(378, 72, "`nnx.split`", "middle")
        d.arrow((440, 219), (316, 219), kind="weft")
        d.text(378, 209, "`nnx.merge`", "middle")
        d.text(378, 239, "`nnx.update`", "middle")
        d.text(440, 280, "`merge` makes new objects,")
        d.text(440, 300, "`update` writes into yours.")
        return d
    d.arrow((100, 316), (100, 368), kind="weft")
    d.text(110, 346, "`nnx.split`")
    d.arrow((250, 368), (250, 316), kind="weft")
    d.text(260, 340, "`merge`,")
    d.text(260, 357, "`update`")
    d.region(12, 368, 336, 304, "a description and values")
    d.box(24, 400, 312, 124, *graphdef, left=True)
    d.box(24, 540, 312, 70, *state, kind="state", left=True)
    d.text(180, 634, "`merge` makes new objects,", "middle")
    d.text(180, 654, "`update` writes into yours.", "middle")
    return d


def contexts(wide: bool) -> Drawing:
    """Draws the stack of contexts of a call."""
    stack = "the stack, while `hidden` runs"
    call = "`functional(model, prng_key, state, inputs, …)`"
    top = (
        "# context `model`",
        "`state`  all of it",
        "`prng_key`  yours",
        "`output_collection`  new",
    )
    child = (
        "# context `model.hidden`",
        "`state`  `state['hidden']`",
        "`prng_key`  yours, `hidden` folded in",
        "`output_collection`  its part",
    )
    collection = (
        "# `OutputCollection`",
        *(f"`{n}`" for n in ("summaries", "state_updates", "module_outputs")),
    )
    d = Drawing(WIDE, 388) if wide else Drawing(NARROW, 784)
    if wide:
        d.box(12, 12, 696, 40, f"# {call}", kind="weft")
        d.region(12, 92, 168, 284, "the modules")
        d.box(32, 132, 128, 52, "# `model`", "`MLP`")
        d.box(22, 240, 70, 52, "`hidden`", "`Linear`")
        d.box(100, 240, 70, 52, "`out`", "`Linear`")
        for x in (57, 135):
            d.arrow((96, 184), (96, 212), (x, 212), (x, 240))
        d.text(96, 330, "~ made once, from", "middle")
        d.text(96, 348, "~ configs; no arrays", "middle")
        d.region(192, 92, 336, 284, stack, "weft", at=324, anchor="end")
        d.box(204, 132, 312, 88, *top, kind="weft", left=True)
        d.box(204, 276, 312, 88, *child, kind="weft", left=True)
        d.arrow((236, 52), (236, 132), kind="state")
        d.text(250, 78, "one context for the root")
        d.arrow((236, 220), (236, 276), kind="state")
        d.text(250, 252, "`self.hidden(x)`: `add_child('hidden')`")
        d.region(540, 92, 168, 284, "what comes back")
        d.box(550, 132, 148, 52, "# the result", "`y`", kind="state")
        d.box(550, 240, 148, 88, *collection, kind="state", left=True)
        d.arrow((516, 158), (550, 158), kind="state")
        d.arrow((516, 296), (550, 296), kind="state")
        d.text(624, 352, "~ nested as the modules", "middle")
        return d
    d.region(12, 12, 336, 188, "the modules, made once from configs")
    d.box(116, 48, 128, 52, "# `model`", "`MLP`")
    d.box(60, 136, 112, 52, "# `hidden`", "`Linear`")
    d.box(188, 136, 112, 52, "# `out`", "`Linear`")
    for x in (116, 244):
        d.arrow((180, 100), (180, 118), (x, 118), (x, 136))
    d.box(
        12,
        224,
        336,
        52,
        "# `functional(model, prng_key,`",
        "# `state, inputs, …)`",
        kind="weft",
    )
    d.region(12, 316, 336, 284, stack, "weft", at=324, anchor="end")
    d.arrow((48, 276), (48, 352), kind="state")
    d.text(60, 302, "one context for the root")
    d.box(24, 352, 312, 88, *top, kind="weft", left=True)
    d.arrow((48, 440), (48, 500), kind="state")
    d.text(60, 464, "`self.hidden(x)` opens a")
    d.text(60, 482, "context below: `add_child`")
    d.box(24, 500, 312, 88, *child, kind="weft", left=True)
    d.arrow((84, 600), (84, 660), kind="state")
    d.arrow((258, 600), (258, 660), kind="state")
    d.box(24, 660, 120, 88, "# result", "`y`", kind="state")
    d.box(160, 660, 176, 88, *collection, kind="state", left=True)
    d.text(336, 772, "~ nested as the modules", "end")
    return d


def layers(wide: bool) -> Drawing:
    """Draws the packages by layer."""
    names = layer_names()
    assert names == list(LAYERS), "the contract has other layers"
    height = 37 if wide else 0
    rows: list[tuple[list[list[str]], str, str]] = []
    for packages, (kind, text) in LAYERS.items():
        boxes = [list(packages)]
        if not wide and len(packages) > 3:
            boxes = [list(packages[:2]), list(packages[2:])]
        rows.append((boxes, kind, text))
    total = sum(height or 30 * len(boxes) + 26 for boxes, _, _ in rows)
    d = Drawing(WIDE if wide else NARROW, total + 48)
    y = 40
    d.text(40, 26, "~ a package imports only what is below it")
    d.arrow((22, 18), (22, total + 36))
    for boxes, kind, text in rows:
        for line in boxes:
            x, space = 40.0, 356 if wide else 308
            extra = (
                space
                - 6 * (len(line) - 1)
                - sum(text_width(f"`{n}`") for n in line)
            ) / len(line)
            for name in line:
                width = text_width(f"`{name}`") + extra
                d.box(x, y, width, 26, f"`{name}`", kind=kind)
                x += width + 6
            y += 0 if wide else 30
        if wide:
            d.text(408, y + 18, text)
            y += height
        else:
            d.text(40, y + 11, f"~ {text}")
            y += 26
    return d


# By the packages of a layer: the kind of its boxes, and what it is.
LAYERS: dict[tuple[str, ...], tuple[str, str]] = {
    ("compat",): ("plain", "programs of Flax and AXLearn"),
    ("cli", "launch"): ("plain", "commands, and jobs of several processes"),
    ("recipes",): ("plain", "named configs of whole runs"),
    ("evaluation",): ("plain", "metrics of language models"),
    ("generation",): ("plain", "texts from language models"),
    ("trainer", "inference", "report", "debug"): (
        "plain",
        "runs, and what they leave",
    ),
    ("distributed",): ("plain", "processes that wait for each other"),
    ("interop",): ("plain", "layers and files of other libraries"),
    ("input",): ("plain", "files, packing, the batches of a process"),
    ("metrics",): ("plain", "numbers over batches"),
    ("linen", "nnx", "hierarchy"): ("weft", "three ways to write a model"),
    ("core",): ("jax", "scopes, streams of keys, axis metadata"),
    ("lifting",): ("jax", "each JAX transformation, once"),
    ("config", "functional"): (
        "plain",
        "configs without JAX, the math of layers",
    ),
    ("struct", "serialization", "typing"): ("plain", "trees, bytes and types"),
    ("errors",): ("plain", "every error, with advice"),
}


def layer_names() -> list[tuple[str, ...]]:
    """Returns the packages of each layer in the contract, from the top."""
    text = (FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    contract = tomllib.loads(text)["tool"]["importlinter"]["contracts"][0]
    return [tuple(re.findall(r"\w+", layer)) for layer in contract["layers"]]


def batch(wide: bool) -> Drawing:
    """Draws the parts of a step of a run."""
    read = (
        ("plain", ("# read", "`Input.dataset()`", "rows of this process")),
        ("plain", ("# pad", "`Input.batches()`", "if there is a dispatcher")),
        ("weft", ("# place", "`open_batches`", "one array on all devices")),
        ("state", ("# wait", "`PrefetchingIterator`", "two batches ahead")),
    )
    step = (
        ("state", ("# state and batch", "`dispatch_global_batch`")),
        ("jax", ("# forward", "`functional(model, …)`", "loss and summaries")),
        ("jax", ("# backward", "`forward_and_gradients`")),
        ("jax", ("# update", "`Learner.update`", "optimizer, averages")),
        ("state", ("# next state", "`TrainerState`, in place")),
    )
    after = (
        (
            "plain",
            ("# check", "is the loss finite?", "continue, skip or rewind"),
        ),
        ("plain", ("# report", "summaries, while the", "next step runs")),
        ("plain", ("# evaluate, if due", "`run_evalers`")),
        ("weft", ("# save, if due", "`save_checkpoint`")),
    )
    return places(
        wide,
        (
            ("a thread reads ahead", "plain", read),
            ("compiled: `train_step`", "jax", step),
            ("the loop: `SpmdTrainer`", "plain", after),
        ),
    )


def checkpoint(wide: bool) -> Drawing:
    """Draws a save, a restore and what may fail."""
    loop = (
        ("plain", ("# is a save due?", "`save_policy`")),
        ("plain", ("# finish the last save", "`Checkpointer.save`")),
        ("state", ("# copy to the host", "training continues")),
    )
    write = (
        ("state", ("# write, in a thread", "`arrays/` and `python/`")),
        ("weft", ("# wait for all processes", "`CommitGroup`")),
        ("weft", ("# describe", "`index`, `manifest.json`")),
        ("weft", ("# rename", "`commit_dir`")),
    )
    whole = (
        ("state", ("# complete", "from now on it counts")),
        ("weft", ("# keep or remove", "`keep_last_n`, `keep_best`")),
        (
            "weft",
            ("# restore", "the newest; each file is", "checked by its digest"),
        ),
    )
    faults = (
        ("fault", ("# the disk is full", "`NOT SAVED`; training", "continues")),
        (
            "fault",
            (
                "# killed while writing",
                "never restored; the next",
                "save removes it",
            ),
        ),
        (
            "fault",
            (
                "# a file is damaged",
                "its name is logged; the",
                "one before is used",
            ),
        ),
    )
    columns = (
        ("the loop, after step 200", "plain", loop),
        ("`step_00000200.tmp/`", "weft", write),
        ("`step_00000200/`", "state", whole),
    )
    return places(wide, columns, faults)


DRAWINGS: Sequence[Callable[[bool], Drawing]] = (
    *TERMS,
    crossing,
    scopes,
    objects,
    contexts,
    layers,
    batch,
    checkpoint,
)


def files() -> Iterator[tuple[str, str]]:
    """Yields each file's name and text."""
    for draw in DRAWINGS:
        yield f"{draw.__name__}.svg", draw(True).svg()
        yield f"{draw.__name__}-narrow.svg", draw(False).svg()


if __name__ == "__main__":
    for file, text in files():
        (FOLDER / file).write_text(text, encoding="utf-8")
