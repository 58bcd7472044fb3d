"""Draws the terms that a newcomer meets; `docs.concepts.drawings` writes the files."""

from collections.abc import Callable, Sequence

from docs.concepts.drawing import LINE_HEIGHT, Drawing

WIDE, NARROW = 720, 360
MARGIN = 12
ARROW = 26
"""Length of the arrow between two boxes."""
Item = tuple[str, tuple[str, ...]]
"""Kind and lines of a box."""


def chain(wide: bool, items: Sequence[Item], note: str = "") -> Drawing:
    """Returns boxes in a row, or below each other on a phone, with arrows from each to the next.

    A note is a line of text below.
    """
    lines_of_highest = max(len(lines) for _, lines in items)
    box_height = LINE_HEIGHT * lines_of_highest + 16
    note_height = LINE_HEIGHT + 8 if note else 0
    if wide:
        arrows = ARROW * (len(items) - 1)
        box_width = (WIDE - 2 * MARGIN - arrows) / len(items)
        drawing = Drawing(WIDE, box_height + note_height + 2 * MARGIN)
        middle = MARGIN + box_height / 2
        for index, (kind, lines) in enumerate(items):
            left = MARGIN + index * (box_width + ARROW)
            drawing.box(left, MARGIN, box_width, box_height, *lines, kind=kind)
            if index:
                drawing.arrow((left - ARROW, middle), (left, middle))
        bottom = MARGIN + box_height
    else:
        heights = [LINE_HEIGHT * len(lines) + 16 for _, lines in items]
        length = sum(heights) + ARROW * (len(items) - 1)
        drawing = Drawing(NARROW, length + note_height + 2 * MARGIN)
        top = MARGIN
        for index, ((kind, lines), height) in enumerate(
            zip(items, heights, strict=True)
        ):
            if index:
                drawing.arrow((180, top), (180, top + ARROW))
                top += ARROW
            drawing.box(40, top, 280, height, *lines, kind=kind)
            top += height
        bottom = top
    if note:
        drawing.text(
            drawing.width / 2, bottom + LINE_HEIGHT + 4, note, "middle"
        )
    return drawing


def table(
    wide: bool, label: str, rows: Sequence[tuple[str, str, str]]
) -> Drawing:
    """Returns a region with a box for each row: its kind, its name and what it is."""
    width = WIDE if wide else NARROW
    row_height = LINE_HEIGHT + 16
    pitch = row_height + 8
    drawing = Drawing(width, pitch * len(rows) + 38 + 2 * MARGIN)
    drawing.region(
        MARGIN, MARGIN, width - 2 * MARGIN, pitch * len(rows) + 38, label
    )
    name_width = 250 if wide else 124
    left = 24
    right = left + name_width + 8
    text_width = width - right - 24
    for index, (kind, name, text) in enumerate(rows):
        top = MARGIN + 32 + index * pitch
        drawing.box(
            left, top, name_width, row_height, name, kind=kind, left=True
        )
        drawing.box(right, top, text_width, row_height, text, left=True)
    return drawing


def model(wide: bool) -> Drawing:
    """Draws what a model computes."""
    return chain(
        wide,
        (
            ("plain", ("# inputs", "images,", "of 64 numbers")),
            ("weft", ("# `hidden`", "`nnx.Linear`")),
            ("plain", ("# function", "`nnx.relu`")),
            ("weft", ("# `out`", "`nnx.Linear`")),
            ("plain", ("# outputs", "10 scores", "for each image")),
        ),
    )


def state(wide: bool) -> Drawing:
    """Draws what a run keeps between two steps."""
    return table(
        wide,
        "# state after step 200",
        (
            ("state", "`hidden`, `out`", "parameters"),
            ("state", "`mu`, `nu`", "optimizer's averages"),
            ("state", "`prng_key`", "the random key"),
            ("state", "`step`", "200"),
            ("state", "input", "batches already read"),
        ),
    )


def step(wide: bool) -> Drawing:
    """Draws one step of training."""
    return chain(
        wide,
        (
            ("state", ("# state", "and a batch", "of examples")),
            ("jax", ("# forward", "the model and", "its loss")),
            ("jax", ("# backward", "gradients of", "the loss")),
            ("jax", ("# update", "the optimizer,", "`optax`")),
            ("state", ("# next state", "and what is", "reported")),
        ),
        "one function, compiled once by `jax.jit`" if wide else "",
    )


def run(wide: bool) -> Drawing:
    """Draws the directory of a run."""
    return table(
        wide,
        "# the directory of a run",
        (
            ("weft", "`config.txt`", "what the run is"),
            ("weft", "`run.json`", "what started it"),
            ("state", "`checkpoints/`", "states of some steps"),
            ("plain", "`summaries/`", "metrics by step"),
            ("plain", "`report.html`", "a page to look at"),
        ),
    )


def recipe(wide: bool) -> Drawing:
    """Draws what a command makes of a recipe."""
    return chain(
        wide,
        (
            ("plain", ("# command", "`weft train lm`", "`max_step=100`")),
            ("weft", ("# recipe `lm`", "a function", "in Python")),
            ("weft", ("# config", "all choices", "as data")),
            ("jax", ("# run", "trains in", "a directory")),
        ),
    )


def config(wide: bool) -> Drawing:
    """Draws some fields of a config, one of them changed."""
    return table(
        wide,
        "# `SpmdTrainer.Config`",
        (
            ("weft", "`max_step`", "`300`"),
            ("weft", "`model`", "`Net.Config`"),
            ("weft", "`model.width`", "`64`, changed to `128`"),
            ("weft", "`optimizer`", "`optax.adam`"),
            ("weft", "`input`", "`ArrayInput.Config`"),
        ),
    )


def saved(wide: bool) -> Drawing:
    """Draws a run that is killed and started again."""
    return chain(
        wide,
        (
            ("jax", ("# training", "steps 1 to 200")),
            ("state", ("# checkpoint", "of step 200")),
            ("fault", ("# killed", "in step 250")),
            ("weft", ("# same command", "reads the", "checkpoint")),
            ("jax", ("# training", "from step 201", "same numbers")),
        ),
    )


def evaluation(wide: bool) -> Drawing:
    """Draws an evaluation."""
    return chain(
        wide,
        (
            ("plain", ("# held-out data", "never trained on")),
            ("state", ("# parameters", "of step 200")),
            ("jax", ("# model", "without dropout", "and updates")),
            ("plain", ("# metrics", "`accuracy` 0.95", "`loss` 0.17")),
        ),
    )


TERMS: Sequence[Callable[[bool], Drawing]] = (
    model,
    state,
    step,
    run,
    recipe,
    config,
    saved,
    evaluation,
)
