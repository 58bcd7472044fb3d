"""`weft sample` continues prompts, and `weft chat` holds a conversation, with a trained model.

The model is that of a run, or of a Hugging Face folder, which needs no run. Texts go to the
standard output, and what people read besides, such as the tokens per second, to the error stream.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft import errors, trainer
from weft.cli.configs import run_config
from weft.cli.trained_models import (
    base_folder,
    find_tokenizer,
    restore_model,
)
from weft.generation import Completion, Generator, LanguageModel
from weft.generation.generator import language_model
from weft.hierarchy import Module
from weft.input.tokenizers import Tokenizer
from weft.interop.huggingface import load_tokenizer
from weft.interop.huggingface.tokenizer import has_tokenizer
from weft.recipes.load import best_step_of_run
from weft.serialization.untrusted import printable
from weft.trainer import run_dir
from weft.trainer.compilation import compilation_cache
from weft.typing import NestedTensor

_SETTINGS = (
    *("tokens", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "stop", "n", "seed"),
)


def print_sample(arguments: argparse.Namespace) -> int:
    """Prints prompts and their continuations."""
    prompts = _prompts(arguments)
    if arguments.stream and len(prompts) * arguments.n > 1:
        raise errors.CommandLineError(
            f"--stream shows one text, and {len(prompts) * arguments.n} are to be generated; "
            "leave it out."
        )
    with compilation_cache(None):
        generator = _generator(arguments, prompts)
        settings = _settings(arguments)
        start = time.perf_counter()
        if arguments.stream:
            completions = [_print_stream(generator, prompts[0], settings)]
        else:
            completions = generator.generate(prompts, **settings)
            _print_completions(prompts, completions, arguments.n)
    _print_speed(completions, time.perf_counter() - start)
    return 0


def chat(arguments: argparse.Namespace) -> int:
    """Answers the lines of the standard input, until its end or `/exit`."""
    with compilation_cache(None):
        generator = _generator(arguments, [])
        if generator.model.chat_template is None:
            raise errors.CommandLineError(
                f"the model in {arguments.dir!r} has no chat template, which says how a "
                "conversation is written. Continue a text: weft sample."
            )
        settings = _settings(arguments)
        messages = _first_messages(arguments)
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            _print_aside(
                "/reset forgets the conversation, /exit or Ctrl-D ends it."
            )
        while True:
            try:
                line = input("> " if is_terminal else "")
            except EOFError:
                return 0
            if line.strip() == "/exit":
                return 0
            if line.strip() == "/reset":
                messages = _first_messages(arguments)
                continue
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            start = time.perf_counter()
            answer = _print_stream(generator, messages, settings)
            _print_speed([answer], time.perf_counter() - start)
            messages.append({"role": "assistant", "content": answer.text})


def _first_messages(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if arguments.system is None:
        return []
    return [{"role": "system", "content": arguments.system}]


def generate_text(
    layer: Module,
    params: NestedTensor,
    *,
    tokenizer: Tokenizer,
    tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Returns a text without a prompt from a model, such as that of a trainer."""
    generator = Generator(
        of_layer(layer, params, tokenizer), expected_tokens=tokens
    )
    (completion,) = generator.generate(
        "", tokens=tokens, temperature=temperature, seed=seed
    )
    return completion.text


def of_layer(
    layer: Module, params: NestedTensor, tokenizer: Tokenizer
) -> LanguageModel:
    """Returns the language model of a run: a document begins with the end of the one before."""
    end_ids = [tokenizer.eos_id, tokenizer.pad_id]
    end_ids += run_dir.end_ids(layer.config)
    return LanguageModel(
        layer, params, tokenizer, end_ids, start_ids=[tokenizer.eos_id]
    )


# The model.


def _generator(
    arguments: argparse.Namespace, prompts: Sequence[str]
) -> Generator:
    model = model_of_arguments(arguments)
    expected_tokens = None
    if prompts:
        expected_tokens = len(prompts) * arguments.n * arguments.tokens
    return Generator(
        model, expected_tokens=expected_tokens, weights=arguments.weights
    )


def model_of_arguments(arguments: argparse.Namespace) -> LanguageModel:
    """Returns the model of a run at a step, or of a Hugging Face folder."""
    directory = arguments.dir
    is_folder = os.path.exists(os.path.join(directory, "config.json"))
    if not is_folder or run_dir.was_started(directory):
        cfg = run_config(directory, **arguments.trust)
        return _of_run(cfg, arguments.step)
    if arguments.step is not None:
        raise errors.CommandLineError(
            f"--step chooses a checkpoint of a run, and {directory!r} is a Hugging Face folder, "
            "which has one model; leave it out."
        )
    model = language_model(directory)
    if model.tokenizer is None:
        raise errors.CommandLineError(
            f"{directory!r} has no tokenizer: neither tokenizer.json nor tokenizer.model. Put "
            "that of the model there."
        )
    return model


def _of_run(
    cfg: trainer.SpmdTrainer.Config, step: int | str | None
) -> LanguageModel:
    tokenizer = find_tokenizer(cfg)
    if tokenizer is None:
        raise errors.CommandLineError(
            f"the run in {cfg.dir!r} reads no text: its input has no tokenizer."
        )
    if step == "best":
        step = best_step_of_run(cfg.dir)
    assert not isinstance(step, str)
    layer, params = restore_model(cfg, step=step)
    model = of_layer(layer, params, tokenizer)
    base = base_folder(cfg)
    # A model of bytes needs no file of a tokenizer.
    if base is None or not has_tokenizer(base):
        return model
    template = load_tokenizer(base).chat_template
    return dataclasses.replace(model, chat_template=template)


# The arguments.


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    values = vars(arguments)
    return {name: values[name] for name in _SETTINGS if name in values}


def _prompts(arguments: argparse.Namespace) -> list[str]:
    """Returns the prompt, or those of a file, one in each line."""
    if arguments.prompt_file is None:
        prompts = [arguments.prompt or ""]
    elif arguments.prompt is not None:
        raise errors.CommandLineError(
            "--prompt and --prompt-file both say what to continue; leave one of them out."
        )
    else:
        prompts = _lines(arguments.prompt_file)
    for prompt in prompts:
        # What the system's encoding lacks arrives as surrogates.
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise errors.CommandLineError(
                f"--prompt {prompt!a} has bytes that are not in {sys.getfilesystemencoding()}, the "
                "encoding of this process; write it in that encoding, or set PYTHONUTF8=1 for "
                "UTF-8."
            )
    return prompts


def _lines(path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.CommandLineError(
            f"--prompt-file {path!r} cannot be read ({error}). Name a text file in UTF-8 with a "
            "prompt in each line."
        ) from error
    lines = [line for line in text.splitlines() if line]
    if not lines:
        raise errors.CommandLineError(
            f"--prompt-file {path!r} has no prompts; expected one in each line."
        )
    return lines


# The output.


def _print_completions(
    prompts: Sequence[str], completions: Sequence[Completion], n: int
) -> None:
    for number, completion in enumerate(completions, start=1):
        if len(completions) > 1:
            title = f"prompt {completion.prompt_index + 1}"
            if n > 1:
                title += f", sample {completion.sample_index + 1}"
            print(f"--- {title}")
        prompt = prompts[completion.prompt_index]
        print(printable(prompt + completion.text))
        if number < len(completions):
            print()


def _print_stream(
    generator: Generator, prompt: Any, settings: dict[str, Any]
) -> Completion:
    """Prints a text while it is generated, after the prompt if that is a text."""
    if isinstance(prompt, str):
        print(printable(prompt), end="", flush=True)
    completion = None
    for part in generator.stream([prompt], **settings):
        print(printable(part.text), end="", flush=True)
        completion = part.completion
    print(flush=True)
    assert completion is not None
    return completion


def _print_speed(completions: Sequence[Completion], seconds: float) -> None:
    num_tokens = sum(len(each.token_ids) for each in completions)
    _print_aside(
        f"[{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s]"
    )


def _print_aside(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
