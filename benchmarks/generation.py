"""How fast is text generated, compared with `transformers`, and with batches that wait for all?

A Llama of 57 million parameters in float32 continues random prompts of 64 tokens, with the same
sizes in both libraries. They take turns: `transformers` in a process of its own. A step is
what each of the tokens after the first takes; the first is what a call for one token takes. All
programs are compiled before. Weights in int8 are compared with those in float32, both in Weft.

A second `weft sample` is that of a small model, in a new process, with the compiled programs that
the first left.
"""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness import Row, ratios, row
from weft.generation import Generator, LanguageModel
from weft.generation.decoding_models import decoding_model
from weft.generation.engine import Engine, Request
from weft.generation.sampler import Sampling
from weft.interop.huggingface import FAMILIES
from weft.interop.huggingface.settings import Settings

_SETTINGS = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1280,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Of the model for texts of several lengths.
_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 4000,
}
_PROMPT = 64
# Tokens after the first, by batch size; the time of the first one is taken off.
_STEPS = {1: 32, 8: 16, 32: 12}
_PAIRS = 15
_SAMPLE_SECONDS = 3.0
# Measured on two cores, with 1, 8 and 32 rows.
_FLOOR_OF_STEPS = (
    "XLA's products with the weights alone take 9.8 of 10.5 ms, 15.1 of 19.7 and 22.4 of 33.6; "
    "with the weights first or transposed, they are not faster in a model"
)
_FLOOR_OF_INT8 = (
    "XLA has no product of floats with int8 on CPUs: weights become floats in a loop, which runs "
    "on one of the two cores; 6.5 ms instead of 10.2, or 12.9 instead of 18"
)
_FLOOR_OF_QUEUE = (
    "steps alone would be 0.42: 618 instead of 1,475; prompts of 64 tokens take both the same "
    "time, 0.17 s of 1.1 and 2.1"
)
_RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "k=50 p=0.9": {"top_k": 50, "top_p": 0.9},
}


def _prompts(batch: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, 32000, (batch, _PROMPT))


def _model(settings: dict[str, Any]) -> LanguageModel:
    cfg: Any = FAMILIES["llama"].read(Settings(settings, "the benchmark"))
    layer = cfg.set(name="model").instantiate(parent=None)
    return LanguageModel(layer, layer.initialize_parameters_recursively(jax.random.key(0)))


def _transformers(connection: Connection) -> None:
    """Generates as often as it is asked to; sends the seconds of each time."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    values = {name: value for name, value in _SETTINGS.items() if name != "model_type"}
    cfg = transformers.LlamaConfig(**values)
    model: Any = transformers.LlamaForCausalLM(cfg).eval()
    while request := connection.recv():
        batch, tokens, rules = request
        settings: dict[str, Any] = {"do_sample": False}
        if rules.get("temperature") != 0:
            settings = {"do_sample": True, **rules}
        ids = torch.tensor(_prompts(batch))
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
                **settings,
            )
        connection.send(time.perf_counter() - start)


@contextlib.contextmanager
def _process(target: Callable[[Connection], None]) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    connection, other_end = context.Pipe()
    process = context.Process(target=target, args=(other_end,), daemon=True)
    process.start()
    yield connection
    connection.send(None)
    process.join()


def _against_transformers(model: LanguageModel) -> list[Row]:
    rows: list[Row] = []
    with _process(_transformers) as other:
        for batch, steps in _STEPS.items():
            rows += _rows_of_batch(model, other, batch, steps)
    return rows


def _rows_of_batch(model: LanguageModel, other: Connection, batch: int, steps: int) -> list[Row]:
    generator = Generator(model, batch_size=batch)
    prompts = list(_prompts(batch))

    def turns(tokens: int, rules: dict[str, Any]) -> np.ndarray:
        """Returns the seconds of calls of Weft and of `transformers`, without the first ones.

        All are of one length, so that both libraries have waited equally long before a call: after
        a second without work, the processors of a virtual machine begin slowly.
        """
        seconds: list[tuple[float, float]] = []
        for _ in range(_PAIRS + 1):
            start = time.perf_counter()
            generator.generate(prompts, tokens=tokens, **rules)
            elapsed = time.perf_counter() - start
            other.send((batch, tokens, rules))
            seconds.append((elapsed, other.recv()))
        return np.array(seconds[1:])  # the first pair compiles

    # A call for one token has no steps.
    firsts = turns(1, _RULES["greedy"])
    rows: list[Row] = []
    for name, rules in _RULES.items():
        times = (turns(1 + steps, rules) - np.median(firsts, axis=0)) / steps
        question = f"a step of {batch} rows, {name} / transformers"
        rows.append(_row(question, times, at_most=1 / 1.5, why=_FLOOR_OF_STEPS))
    if batch == 1:
        question = "the first token of a prompt of 64 / transformers"
        rows.append(_row(question, firsts, at_most=1.0))
    return rows


def _int8_weights(model: LanguageModel) -> Row:
    """Compares steps with weights in int8 and in float32, in turns."""
    generators = [Generator(model, batch_size=1, weights=weights) for weights in ("int8", None)]
    prompts = list(_prompts(1))
    steps = _STEPS[1]

    def seconds(generator: Generator, tokens: int) -> float:
        start = time.perf_counter()
        generator.generate(prompts, tokens=tokens, **_RULES["greedy"])
        return time.perf_counter() - start

    of_steps: list[np.ndarray] = []
    for _ in range(_PAIRS + 1):
        firsts = np.array([seconds(generator, 1) for generator in generators])
        wholes = np.array([seconds(generator, 1 + steps) for generator in generators])
        of_steps.append((wholes - firsts) / steps)
    question = "a step of 1 rows, greedy, int8 weights / float32 weights"
    times = np.array(of_steps[1:])  # the first pair compiles
    return _row(question, times, at_most=1 / 2, why=_FLOOR_OF_INT8)


def _row(question: str, seconds: np.ndarray, *, at_most: float, why: str = "") -> Row:
    first, second = seconds.T
    return row(
        question,
        ((first / second).tolist(), first.tolist(), second.tolist()),
        at_most=at_most,
        note="a Llama of 57 million parameters",
        why=why,
    )


class _Tokens:
    """Receiver of tokens that nobody reads."""

    def add(self, tokens: Sequence[int]) -> bool:
        """Takes further tokens, and asks for more."""
        del tokens
        return True


def _continuous() -> Row:
    """Compares a queue of requests with batches in which all wait for the longest."""
    num_rows, num_texts = 8, 64
    model = _model(_SETTINGS | _SMALL)
    engine = Engine(decoding_model(model.layer), model.params, end_ids=[], batch_size=num_rows)
    random = np.random.default_rng(0)
    lengths = np.exp(random.uniform(np.log(8), np.log(256), num_texts)).astype(int)
    requests: list[Request] = []
    for index, prompt in enumerate(_prompts(num_texts) % _SMALL["vocab_size"]):
        requests.append(Request(prompt, int(lengths[index]), jax.random.key(index)))

    def generate(part: list[Request]) -> None:
        sinks = [_Tokens() for _ in part]
        for _ in engine.run(part, sinks, Sampling(temperature=0)):
            pass

    def batches() -> None:
        for start in range(0, num_texts, num_rows):
            generate(requests[start : start + num_rows])

    return row(
        f"{num_texts} texts of 8 to 256 tokens, {num_rows} at once / in batches that wait",
        ratios(lambda: generate(requests), batches, pairs=_PAIRS),
        at_most=1 / 2,
        note=f"{lengths.sum():,} tokens of a Llama of 4 million parameters, with logarithms "
        "of the lengths equally spread",
        why=_FLOOR_OF_QUEUE,
    )


_SAMPLE = """
import os, sys
from weft.cli import main
assert main(["sample", sys.argv[1], "--prompt", "def ", "--tokens", "64"]) == 0
print()
print(sum(os.times()[:2]))
"""
_TRAIN = "import sys; from weft.cli import main; sys.exit(main(sys.argv[1:]))"


def _second_sample() -> Row:
    """Samples from a run of the smallest recipe, each time in a new process."""
    unset = ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    with tempfile.TemporaryDirectory() as name:
        env["XDG_CACHE_HOME"] = str(Path(name) / "cache")
        directory = str(Path(name) / "run")

        def python(program: str, *arguments: str) -> str:
            done = subprocess.run(
                [sys.executable, "-c", program, *arguments],
                env=env,
                capture_output=True,
                encoding="utf-8",
                check=True,
            )
            return done.stdout

        python(_TRAIN, "train", "lm-tiny", "max_step=1", f"dir={directory}")
        python(_SAMPLE, directory)  # the first one, which compiles
        seconds: list[float] = []
        for _ in range(_PAIRS):
            seconds.append(float(python(_SAMPLE, directory).splitlines()[-1]))
    quotients = [each / _SAMPLE_SECONDS for each in seconds]
    return row(
        f"a second weft sample of lm-tiny, CPU seconds / {_SAMPLE_SECONDS:g} s",
        (quotients, seconds, [_SAMPLE_SECONDS] * _PAIRS),
        at_most=1.0,
    )


def run() -> list[Row]:
    """Texts of one model by Weft and by `transformers`, of several lengths, and by the command."""
    model = _model(_SETTINGS)
    return [
        *_against_transformers(model),
        _int8_weights(model),
        _continuous(),
        _second_sample(),
    ]
