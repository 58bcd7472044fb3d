"""`weft.finetune`: supervised fine-tuning of a checkpoint in one call, as `weft train sft` does."""

from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import FitError
from weft.input.conversations import Rows
from weft.recipes.sft import HELD_OUT, Tuning, set_best, sft_config
from weft.trainer.compilation import compilation_cache
from weft.trainer.fit import run_to_result
from weft.trainer.fit_result import VALIDATION, FitResult, Watched
from weft.trainer.hooks import Hook
from weft.trainer.parallelism import ParallelismModifier
from weft.trainer.run_lock import move_aside


@compilation_cache(None)
def finetune(
    base: str,
    data: str | Sequence[Mapping[str, Any]],
    *,
    tuning: Tuning = "lora",
    rank: int = 16,
    alpha: float | None = None,
    targets: Sequence[str] | None = None,
    dropout: float = 0.0,
    held_out: float = 0.05,
    sequence_length: int = 1024,
    batch_size: int | None = None,
    epochs: int = 3,
    steps: int | None = None,
    learning_rate: float | None = None,
    mesh: Mapping[str, int] | None = None,
    seed: int = 0,
    dir: str | None = None,
    fresh: bool = False,
    resume: bool = False,
    progress: bool = True,
    callbacks: Sequence[Hook] = (),
) -> FitResult[Any]:
    """Tunes a checkpoint on the answers of conversations.

        result = weft.finetune("llama-3.2-1b", "chat.jsonl", tuning="lora-nf4", dir="runs/chat")
        to_peft("adapter", result.config.model, result.best.variables, base="llama-3.2-1b")

    Args:
        base: The folder of a Hugging Face checkpoint, with its tokenizer.
        data: A file of JSON lines or Parquet, or a list of rows. A row has `messages`, a `prompt`
            and a `completion`, or a `text`; see `weft.input.chat.encode_example`.
        tuning: "full" trains all parameters; "lora" adapters on a frozen base in bfloat16, and
            "lora-int8" and "lora-nf4" on one in 8 and 4 bits.
        rank: Rank of the adapters.
        alpha: Their outputs are multiplied by `alpha / rank`; twice the rank by default.
        targets: The linear maps with adapters, such as `["q_proj", "v_proj"]`; all by default.
            `"experts"` are the weights of experts, which have none by default.
        dropout: Rate at which inputs of adapters are dropped in training.
        held_out: Fraction of the rows to evaluate on; 0 for none.
        sequence_length: Tokens of a sequence, into which rows are packed.
        batch_size: Sequences per step; 8 by default, or as many as there are.
        epochs: Number of passes over the data.
        steps: Number of steps, in place of `epochs`.
        learning_rate: Highest learning rate; 2e-5 for "full", otherwise 2e-4.
        mesh: Sizes of the axes of a mesh, such as `{"fsdp": 4, "model": 2}`, see
            `weft.trainer.ParallelismModifier`; by default, rows of a batch are divided among all
            devices, and each holds the model.
        seed: Seed of the adapters, of dropout and of the order of the rows.
        dir, fresh, resume, progress, callbacks: As in `weft.fit`.

    Returns the history, and the model with its parameters after the last step and after that with
    the smallest held-out loss: `result.best.model` and `result.best.variables`.

    Raises:
        FitError: If arguments contradict each other.
        WeightsReadError: If there is no checkpoint at `base`.
        HuggingFaceConfigError: If its model is not supported.
        InputReadError: If a row of a file is of another form; InputDatasetError for one of a list.
        LayerConfigError: If there is no such target.
        MeshError: If the mesh does not fit the devices or the model.
        RunDirError: If `dir` belongs to a run with other arguments, code or data.
    """
    counts = {"epochs": epochs, "steps": steps, "batch_size": batch_size}
    for name, value in {**counts, "rank": rank}.items():
        if value is not None and value < 1:
            raise FitError(f"finetune got {name}={value}; expected 1 or more.")
    if fresh and resume:
        raise FitError(
            "finetune got fresh=True, which starts a run again, and resume=True, which continues "
            "it; expected one of the two."
        )
    cfg = sft_config(
        "",
        base,
        data if isinstance(data, str) else Rows(data),
        tuning=tuning,
        rank=rank,
        alpha=alpha,
        targets=targets,
        dropout=dropout,
        held_out=held_out,
        sequence_length=sequence_length,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        learning_rate=learning_rate,
    )
    if mesh is not None:
        sizes: dict[str, Any] = dict(mesh)
        modifier = ParallelismModifier.default_config().set(**sizes)
        cfg = modifier.instantiate()(cfg)
    cfg.seed = seed
    cfg.input.source.seed = seed
    if held_out > 0:
        # `FitResult` reads the evaluations of this name.
        cfg.evalers[VALIDATION] = cfg.evalers.pop(HELD_OUT)
        set_best(cfg, VALIDATION)
    if fresh and dir is not None:
        move_aside(dir)
    watched = Watched("loss", "min")
    return run_to_result(
        cfg.model, cfg, dir, progress, callbacks, watched, resume
    )
