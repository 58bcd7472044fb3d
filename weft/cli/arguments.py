"""Argument parsers of all commands, and `weft recipes`. Imports nothing slow."""

import argparse
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import weft
from weft.errors import CommandLineError, did_you_mean, similar_names
from weft.recipes import RECIPES, find_recipe, named_trainer_configs

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_RUN = "the directory of a run, or a recipe whose config names it"
_RECIPE = (
    "a recipe: a name (see `weft recipes`), path/to/file.py:function or package.module:function; "
    "or a config file, or the directory of a run"
)


_SUMMARIES = {
    "train": "train a recipe, or continue a run",
    "launch": "train with several processes: on this machine, with Slurm, or with Kubernetes",
    "local": "start the processes on this machine",
    "slurm": "print a script for sbatch, or submit it",
    "k8s": "print a JobSet manifest for kubectl",
    "recipes": "list the recipes, the default one first",
    "show": "print a config as text that Weft can read",
    "diff": "print the differences between two configs; exit code 1 if there are any",
    "sample": "generate text from a trained run, or a Hugging Face folder",
    "chat": "hold a conversation with a model that has a chat template",
    "eval": "measure a language model on texts, questions or tasks",
    "inspect": "print what a run's checkpoints or a Hugging Face folder hold, without loading it",
    "report": "write the report of a run, or a comparison of several, as one HTML page",
    "export": "write a run's parameters as safetensors, or as a Hugging Face checkpoint",
    "tabulate": "print the model as a table, without allocating its arrays",
    "check": "compile a recipe for a mesh, and print its sharding; exit code 1 if it does not fit",
    "lr-find": "suggest a learning rate, from a short run with increasing rates",
    "sweep": "train a recipe with each of several settings, and compare the runs",
    "completion": "print what a shell reads to complete `weft` commands",
    "run-as-flax": "run a program that imports flax on Weft, without editing it",
}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments of a command; `command` is the function that runs it, `module:function`.

    Raises:
        CommandLineError: for an unknown command.
        SystemExit: from argparse, which has printed help or an error.
    """
    parser, commands = _build_parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what could come next
        from weft.cli.completion import complete

        complete(parser)
    if argv and not argv[0].startswith("-") and argv[0] not in commands.choices:
        raise CommandLineError(
            f"unknown command {argv[0]!r}. {did_you_mean(argv[0], commands.choices)}"
        )
    if argv and argv[0] == "train" and ("-h" in argv or "--help" in argv):
        train = commands.choices["train"]
        recipes = [
            word
            for word in argv[1:]
            if not word.startswith("-") and "=" not in word
        ]
        if recipes:
            description = find_recipe(recipes[0]).description()
            train.epilog = f"{train.epilog}\nArguments of {description}\n"
    arguments, unparsed_words = parser.parse_known_args(argv)
    arguments.words = list(argv)
    if "allow" in arguments:
        arguments.trust = {
            "allow": arguments.allow,
            "recipe": arguments.made_by,
        }
    if unparsed_words:
        # argparse does not accept positional arguments after an option.
        overrides = getattr(arguments, "overrides", None)
        if overrides is None:
            overrides = getattr(arguments, "recipe_and_overrides", None)
        if overrides is not None:
            command = commands.choices[argv[0]]
            _check_dashes(unparsed_words, argv, command)
        if overrides is None or any(
            word.startswith("-") for word in unparsed_words
        ):
            parser.error(f"unrecognized arguments: {' '.join(unparsed_words)}")
        overrides.extend(unparsed_words)
    return arguments


def _check_dashes(
    unparsed_words: Sequence[str],
    argv: Sequence[str],
    command: argparse.ArgumentParser,
) -> None:
    """Refuses a field or an argument of the recipe that is written like an option."""
    options = [
        option.removeprefix("--") for option in command._option_string_actions
    ]
    for word in unparsed_words:
        if not word.startswith("--"):
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        # No option has such characters.
        is_field = bool(equals) or "_" in name or "." in name
        similar_options = similar_names(name, options)
        if similar_options and not is_field:
            raise CommandLineError(
                f"unknown option {word}. Did you mean '--{similar_options[0]}'?"
            )
        next_words = argv[argv.index(word) + 1 :]
        if not equals and next_words and not next_words[0].startswith("-"):
            value = next_words[0]
        setting = f"{name.replace('-', '_')}={value or 'VALUE'}"
        for_job = ""
        if argv[0] == "launch":
            for_job = f"; a field of the job, by --job {setting}"
        raise CommandLineError(
            f"{word}: leave out the dashes. A field of the config, or an argument of the "
            f"recipe, is set by {setting}{for_job}."
        )


def print_welcome(arguments: argparse.Namespace) -> int:
    """Prints what to do first."""
    del arguments
    print(_WELCOME)
    return 0


_WELCOME = f"""\
weft {weft.__version__} trains JAX models.

  weft train                     train a small language model, in minutes
  weft recipes                   list the recipes, and the arguments of one
  weft train my_model.py:recipe  train a model of your own
  weft report runs/lm            write the report of a run, or compare several

`weft --help` lists all commands, `weft train --help` explains one."""


def _build_parser() -> tuple[argparse.ArgumentParser, _Commands]:
    parser = argparse.ArgumentParser(
        prog="weft", description="Trains JAX models."
    )
    parser.add_argument(
        "--version", action="version", version=f"weft {weft.__version__}"
    )
    parser.set_defaults(command="weft.cli.arguments:print_welcome")
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_train(commands)
    _add_launch(commands)
    recipes = _add(commands, "recipes", "arguments:list_recipes")
    recipes.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="list the arguments of this recipe",
    )
    _add_config(commands)
    _add_sample(commands)
    _add_chat(commands)
    _add_eval(commands)
    _add_inspect(commands)
    _add_report(commands)
    _add_export(commands)
    _add_config_arguments(_add(commands, "tabulate", "tabulate:run"))
    _add_check(commands)
    _add_lr_find(commands)
    _add_sweep(commands)
    _add_completion(commands)
    _add_run_as_flax(commands)
    return parser, commands


def _add(
    commands: _Commands, name: str, function: str, **kwargs: Any
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=_SUMMARIES[name],
        description=_sentence(name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **kwargs,
    )
    parser.set_defaults(command=f"weft.cli.{function}")
    return parser


def _sentence(name: str) -> str:
    return f"{_SUMMARIES[name][0].upper()}{_SUMMARIES[name][1:]}."


def _add_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", help=_RUN)


def _add_recipe_and_overrides(
    parser: argparse.ArgumentParser, text: str
) -> None:
    """Adds an optional recipe; `weft.cli.train.split_arguments` tells it from the overrides."""
    parser.add_argument(
        "recipe_and_overrides",
        nargs="*",
        metavar="RECIPE path.to.field=value",
        help=text,
    )
    _add_trust(parser)


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help=_RECIPE)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="path.to.field=value",
        help="sets a field of the config by its dotted path",
    )
    _add_trust(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds what the text of a config may name."""
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="a package, module, function or class of your own that the config text may name "
        "and call; repeatable",
    )
    parser.add_argument(
        "--recipe",
        dest="made_by",
        metavar="RECIPE",
        help="the recipe that made the config of a run or file, such as path/to/file.py:function, "
        "if the run was not started by you on this machine, or the file has moved",
    )


def _add_train(commands: _Commands) -> None:
    train = _add(
        commands,
        "train",
        "train:run",
        usage="weft train [-h] [--fresh] [--resume] [--mesh AXIS=SIZE,...] [--allow NAME] "
        "[RECIPE] [path.to.field=value ...]",
        epilog="Examples:\n"
        "  weft train\n"
        "  weft train lm dir=runs/wide model.decoder.dim=256 max_step=2000 seed=1\n"
        "  weft train lm dir=runs/parallel --mesh fsdp=4,model=2\n"
        "  weft train my_model.py:recipe learning_rate=1e-3\n"
        "\n"
        "If the run's directory holds a checkpoint, training continues from it. Exit codes: 0\n"
        "finished, 1 failed, 2 bad input, 143 after SIGTERM, 130 after Ctrl-C.",
    )
    _add_recipe_and_overrides(
        train,
        f"{_RECIPE}. Defaults to the first recipe. Followed by its arguments (see `weft recipes "
        "RECIPE`) and config fields to set, such as learning_rate=1e-3, dir=runs/name, seed=1",
    )
    _add_fresh(train)
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in the directory although its config, code or data have changed",
    )
    _add_mesh(train)


def _add_fresh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start again: move the directory of an earlier run aside, such as to runs/lm.1",
    )


def _add_launch(commands: _Commands) -> None:
    launch = commands.add_parser(
        "launch", help=_SUMMARIES["launch"], description=_sentence("launch")
    )
    places = launch.add_subparsers(metavar="WHERE", required=True)
    local = _add_place(
        places,
        "local",
        fields="  gpus_per_process=1        GPUs per process; default 0, for the CPU\n"
        "  log_dir=logs              one log file per process, instead of output here\n"
        "  failure_grace_seconds=5   time for the others to exit after one failed\n"
        "  min_processes=3           processes that the next try needs; the same as -n 3:4\n"
        "  rejoin_seconds=600        time after which fewer processes are all of them again\n",
        epilog="If one process fails, the others are stopped, and its exit code is returned. "
        "SIGTERM and\n"
        "Ctrl-C are forwarded to all processes, which save a checkpoint and stop.",
        examples=["lm-tiny dir=runs/two max_step=40", "--job log_dir=logs lm"],
    )
    _add_fresh(local)
    slurm = _add_place(
        places,
        "slurm",
        fields="  nodes=2                   number of nodes; default one per process\n"
        "  gpus_per_process=8  cpus_per_process=32  memory_per_node=400G\n"
        "  time=8:00:00  partition=gpu  account=lab  output=%x-%j.log\n"
        "  sbatch.qos=high           any other option of sbatch\n"
        "  setup='[\"module load cuda\"]'   shell commands to run first\n",
        epilog="",
        examples=[
            "--job time=8:00:00 --job gpus_per_process=8 lm dir=/shared/lm > job.sh",
            "--submit lm dir=/shared/lm",
        ],
    )
    slurm.add_argument(
        "--submit",
        action="store_true",
        help="submit it with submitit (pip install 'weft-jax[launch]') and print the job's number",
    )
    _add_place(
        places,
        "k8s",
        fields="  image=registry/weft:1     container image; required\n"
        "  volume_claim=runs  mount_path=/runs    a directory shared by all pods\n"
        "  working_dir=/runs         working directory; defaults to mount_path\n"
        "  gpus_per_process=8  resources.memory=400Gi\n"
        "  node_selector={...}  labels={...}  namespace=research\n",
        epilog="",
        examples=[
            "--job image=registry/weft:1 --job volume_claim=runs lm dir=/runs/lm "
            "| kubectl apply -f -"
        ],
    )


def _add_place(
    places: _Commands,
    name: str,
    *,
    fields: str,
    epilog: str,
    examples: Sequence[str],
) -> argparse.ArgumentParser:
    count = "[MIN:]N" if name == "local" else "N"
    place = _add(
        places,
        name,
        "train:launch",
        usage=f"weft launch {name} [-h] [--mesh AXIS=SIZE,...] -n {count} "
        "[--job FIELD=VALUE ...] [--allow NAME] [RECIPE] [path.to.field=value ...]",
        epilog="Job fields, each set with --job:\n"
        f"{fields}  env.NAME=VALUE            environment variable of each process\n"
        "  max_tries=3               maximum number of starts; all restart when one fails\n"
        "  grace_seconds=120         time to save after a request to stop\n"
        "  heartbeat_timeout_seconds=100\n"
        "                            time without a heartbeat after which a process is lost\n"
        "  name=lm                   name of the job; defaults to the recipe's\n"
        "\n"
        + (f"{epilog}\n\n" if epilog else "")
        + "Examples:\n"
        + "".join(
            f"  weft launch {name} -n 2 {example}\n" for example in examples
        ),
    )
    place.set_defaults(where=name)
    place.add_argument(
        "-n",
        "--num-processes",
        type=_process_range if name == "local" else int,
        required=True,
        metavar=count,
        help="number of processes; each gets its shard of every batch"
        + ("; MIN:N to continue with fewer" if name == "local" else ""),
    )
    place.add_argument(
        "--job",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="sets a field of the job, see below; repeatable",
    )
    _add_mesh(place)
    _add_recipe_and_overrides(place, "as in `weft train`; after all options")
    return place


def _process_range(text: str) -> tuple[int | None, int]:
    """Returns the fewest processes and all, of a text such as 3:4; None for the fewest of 4."""
    fewest, colon, most = text.rpartition(":")
    try:
        return (int(fewest) if colon else None), int(most)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"invalid value {text!r}; expected N or MIN:N, such as 4 or 3:4"
        ) from None


def _add_config(commands: _Commands) -> None:
    config = commands.add_parser("config", help="show a config, or compare two")
    actions = config.add_subparsers(metavar="ACTION", required=True)
    show = _add(actions, "show", "configs:show_or_diff")
    show.set_defaults(action="show")
    _add_config_arguments(show)
    show.add_argument(
        "--defaults",
        action="store_true",
        help="also print fields that have their default values",
    )
    show.add_argument(
        "--origin",
        action="store_true",
        help="append to each field the line that set it",
    )
    diff = _add(actions, "diff", "configs:show_or_diff")
    diff.set_defaults(action="diff")
    for name in ("a", "b"):
        diff.add_argument(name, metavar=name.upper(), help=_RECIPE)
    _add_trust(diff)


def _add_sample(commands: _Commands) -> None:
    sample = _add(
        commands,
        "sample",
        "sample:print_sample",
        epilog="Examples:\n"
        "  weft sample runs/lm --prompt 'def ' --tokens 100\n"
        "  weft sample checkpoints/llama --prompt-file prompts.txt --top-k 50 --top-p 0.9\n",
    )
    _add_model(sample)
    sample.add_argument(
        "--prompt", help="start of the text; by default nothing"
    )
    sample.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="a text file with a prompt in each line",
    )
    sample.add_argument(
        "--n",
        type=int,
        default=1,
        metavar="N",
        help="number of texts for each prompt (%(default)s)",
    )
    sample.add_argument(
        "--stream",
        action="store_true",
        help="print the text while it is generated",
    )
    _add_sampling(sample)
    _add_trust(sample)


def _add_chat(commands: _Commands) -> None:
    chat = _add(
        commands,
        "chat",
        "sample:chat",
        epilog="Examples:\n"
        "  weft chat checkpoints/llama --system 'Answer in one sentence.'\n",
    )
    _add_model(chat)
    chat.add_argument(
        "--system", metavar="TEXT", help="first message, of the role `system`"
    )
    _add_sampling(chat)
    _add_trust(chat)


def _add_eval(commands: _Commands) -> None:
    parser = _add(
        commands,
        "eval",
        "eval:run",
        epilog="Rows of DATA, in JSON lines or Parquet:\n"
        '  {"text": …}                                  perplexity; so is a file of text\n'
        '  {"prompt": …, "choices": […], "answer": …}   multiple choice\n'
        '  {"prompt": …, "answer": …}                   exact match\n'
        '  {"prompt": …} with --checker                 pass@k\n'
        "\n"
        "Examples:\n"
        "  weft eval runs/lm book.txt --stride 256\n"
        "  weft eval checkpoints/llama questions.jsonl --shots 5 --json result.json\n"
        "  weft eval checkpoints/llama tasks.jsonl --checker check.py:is_right --k 1 --k 10\n",
    )
    _add_model(parser)
    parser.add_argument("data", metavar="DATA", help="a file, see below")
    parser.add_argument(
        "--task",
        choices=("perplexity", "multiple-choice", "exact-match", "pass@k"),
        help="by default the one that the fields of the first row are for",
    )
    for name, metavar, text in (
        ("shots", "N", "solved rows before each prompt (0)"),
        ("length", "N", "tokens of a window of text (the model's, or 1024)"),
        ("stride", "N", "tokens by which it moves on (half of the length)"),
        ("tokens", "N", "largest number of tokens of an answer (64)"),
        ("n", "N", "samples of each prompt for pass@k (the largest k)"),
        ("seed", "N", "of samples and of the choice of solved rows (0)"),
        ("limit", "N", "use the first N rows only"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar=metavar, help=text)
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="of samples for pass@k (0.8); exact answers are the likeliest",
    )
    parser.add_argument(
        "--examples",
        metavar="FILE",
        help="where solved rows come from; by default the other rows of DATA",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="write prompts in the chat template of the model",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end answers before this text; repeatable (the end of the line)",
    )
    parser.add_argument(
        "--checker",
        metavar="FILE.py:FUNCTION",
        help="function of a row and a completion that returns whether it is right",
    )
    parser.add_argument(
        "--k",
        type=int,
        action="append",
        metavar="K",
        help="number of samples, one of them right; repeatable (1)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result of each row here, too"
    )
    _add_trust(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Adds a model that generates text."""
    parser.add_argument(
        "dir",
        metavar="RUN|FOLDER",
        help=f"{_RUN}; or the folder of a Hugging Face checkpoint",
    )
    parser.add_argument(
        "--step",
        type=_step,
        metavar="N",
        help="the step of a run, or 'best' for that with the best value in an evaluation; by "
        "default the newest one",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the settings of generation."""
    for name, default, text in (
        ("tokens", 256, "maximum number of tokens to generate"),
        (
            "temperature",
            0.8,
            "0 for greedy decoding, 1 for the model's own distribution",
        ),
        ("seed", 0, "seed of the sampling"),
    ):
        parser.add_argument(
            f"--{name}",
            type=type(default),
            default=default,
            help=f"{text} (%(default)s)",
        )
    for name, value_type, metavar, text in (
        ("top-k", int, "K", "choose from the K likeliest tokens"),
        (
            "top-p",
            float,
            "P",
            "choose from the fewest tokens with a probability of P together",
        ),
        (
            "min-p",
            float,
            "P",
            "choose from tokens with P times the largest probability, or more",
        ),
        (
            "repetition-penalty",
            float,
            "X",
            "above 1, makes tokens less likely that the text has",
        ),
    ):
        parser.add_argument(
            f"--{name}", type=value_type, metavar=metavar, help=text
        )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; repeatable",
    )
    parser.add_argument(
        "--weights",
        choices=("int8",),
        help="weights in 8 bits, in a quarter of the memory of float32",
    )


def _add_inspect(commands: _Commands) -> None:
    inspect = _add(
        commands,
        "inspect",
        "inspect:run",
        epilog="Examples:\n"
        "  weft inspect runs/lm\n"
        "  weft inspect llama --mesh fsdp=4,model=2\n",
    )
    inspect.add_argument(
        "dir", metavar="DIR", help=f"{_RUN}, or a Hugging Face folder"
    )
    inspect.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="mesh on which to show the layouts of a Hugging Face folder",
    )
    inspect.add_argument(
        "--verify",
        action="store_true",
        help="verify the digest of every file of every checkpoint; exit code 1 if one is damaged",
    )


def _add_report(commands: _Commands) -> None:
    report = _add(
        commands,
        "report",
        "inspect:write_report",
        epilog="Examples:\n"
        "  weft report runs/lm\n"
        "  weft report runs/lm runs/wide --out wide.html\n"
        "\n"
        "The runs may be going on.",
    )
    report.add_argument("dirs", nargs="+", metavar="DIR", help=_RUN)
    report.add_argument(
        "--out",
        metavar="FILE",
        help="the page; by default DIR/report.html, or comparison.html for several runs",
    )


def _step(text: str) -> int | str:
    """Returns the value of `--step`."""
    if text == "best":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither the number of a step nor 'best'"
        ) from None


def _add_export(commands: _Commands) -> None:
    export = _add(
        commands,
        "export",
        "trained_models:export",
        epilog="Examples:\n"
        "  weft export runs/lm --to lm.safetensors\n"
        "  weft export runs/lm-lora --to checkpoints/lm-lora --merge\n"
        "\n"
        "The second form supports causal LMs with a counterpart in transformers: "
        "GPT-2, Llama, Mistral, Qwen.",
    )
    _add_dir(export)
    export.add_argument(
        "--to",
        required=True,
        metavar="PATH",
        help="a *.safetensors file; or a folder, for a Hugging Face checkpoint",
    )
    export.add_argument(
        "--step",
        type=_step,
        metavar="STEP",
        help="step of the checkpoint, or `best`; defaults to the newest",
    )
    export.add_argument(
        "--merge",
        action="store_true",
        help="merge low-rank adapters into the weights, as a Hugging Face checkpoint always does",
    )
    export.add_argument(
        "--dtype",
        help="convert to this dtype, such as bfloat16; defaults to the checkpoint's",
    )
    export.add_argument(
        "--max-file-gb",
        type=float,
        default=5.0,
        metavar="GB",
        help="maximum size of a file; larger exports are split (%(default)g)",
    )
    _add_trust(export)


def _add_sweep(commands: _Commands) -> None:
    sweep = _add(
        commands,
        "sweep",
        "sweep:run",
        usage="weft sweep [-h] --over FIELD=VALUES ... [--samples N] [--seed N] [--jobs N] "
        "[--metric NAME] [--best highest] [--dir DIR] [RECIPE] [path.to.field=value ...]",
        epilog="Examples:\n"
        "  weft sweep digits --over learning_rate=1e-3,3e-3 --over batch_size=32,64 steps=60\n"
        "  weft sweep digits --over 'learning_rate=log(1e-4, 1e-1)' --samples 20 --jobs 2\n"
        "\n"
        "A sweep that was interrupted continues when it is started again.",
    )
    _add_recipe_and_overrides(sweep, "as in `weft train`")
    sweep.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="FIELD=VALUES",
        help="values of a field, separated by commas, or uniform(LOW, HIGH) or log(LOW, HIGH) to "
        "draw from; repeatable: all combinations are tried",
    )
    sweep.add_argument(
        "--samples", type=int, metavar="N", help="try N random settings instead"
    )
    sweep.add_argument(
        "--seed", type=int, default=0, help="seed of the settings (%(default)s)"
    )
    sweep.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at the same time (%(default)s)",
    )
    sweep.add_argument(
        "--metric",
        default="loss",
        help="what to sort by: the name of a summary (%(default)s)",
    )
    sweep.add_argument(
        "--best",
        choices=["lowest", "highest"],
        default="lowest",
        help="which value of the metric is best (%(default)s)",
    )
    sweep.add_argument(
        "--dir", metavar="DIR", help="the directory; by default sweeps/RECIPE"
    )


def _add_completion(commands: _Commands) -> None:
    completion = _add(
        commands,
        "completion",
        "completion:print_script",
        epilog="Once, for your shell:\n"
        "  echo 'eval \"$(weft completion bash)\"' >> ~/.bashrc\n"
        "  echo 'eval \"$(weft completion zsh)\"' >> ~/.zshrc\n"
        "  weft completion fish > ~/.config/fish/completions/weft.fish",
    )
    completion.add_argument(
        "shell", metavar="SHELL", choices=["bash", "zsh", "fish"]
    )


def _add_lr_find(commands: _Commands) -> None:
    find = _add(
        commands,
        "lr-find",
        "lr_find:run",
        usage="weft lr-find [-h] [--min RATE] [--max RATE] [--steps N] [--allow NAME] [RECIPE] "
        "[path.to.field=value ...]",
    )
    for name, default, position in (
        ("min", 1e-6, "first"),
        ("max", 1.0, "last"),
    ):
        find.add_argument(
            f"--{name}",
            type=float,
            default=default,
            help=f"learning rate of the {position} step (%(default)g)",
        )
    find.add_argument(
        "--steps", type=int, default=100, help="number of steps (%(default)s)"
    )
    _add_recipe_and_overrides(find, "as in `weft train`; after all options")


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="sizes of the mesh axes, such as data=4,model=2; if they include fsdp, seq, "
        "expert or pipeline, the transformer is sharded over these axes",
    )
    parser.add_argument(
        "--mesh-selector",
        metavar="NAME",
        help="name of the hardware, matched against the config's mesh_rules",
    )


# Names of `weft.trainer.device_specs.DEVICE_SPECS`, whose import takes a second.
_DEVICES = ("H100", "H200", "B200", "v5e", "v5p", "v6e")


def _count(text: str) -> int:
    """Returns the value of an option that is 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


def _add_check(commands: _Commands) -> None:
    check = _add(
        commands,
        "check",
        "check:run",
        epilog="Examples:\n"
        "  weft check lm --mesh fsdp=4,model=2\n"
        "  weft check lm --mesh data=-1,model=4 --devices v5p-128 --slices 2\n"
        "  weft check lm-8b --mesh fsdp=64 --device H100\n",
    )
    _add_config_arguments(check)
    _add_mesh(check)
    check.add_argument(
        "--devices",
        metavar="N",
        help="a number of virtual CPU devices, or a TPU slice such as v5p-128; defaults to "
        "the mesh size",
    )
    check.add_argument(
        "--device",
        choices=_DEVICES,
        metavar="NAME",
        help=f"predict the time of a step on this device ({', '.join(_DEVICES)}), and compare its "
        "memory; defaults to that of --devices",
    )
    check.add_argument(
        "--slices",
        type=_count,
        default=1,
        metavar="N",
        help="number of slices (%(default)s)",
    )


def _add_run_as_flax(commands: _Commands) -> None:
    program = _add(
        commands,
        "run-as-flax",
        "",
        usage="weft run-as-flax [-h] (SCRIPT | -m MODULE) [ARGUMENT ...]",
    )
    program.set_defaults(command="weft.as_flax:run")
    program.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="a module to run"
    )
    program.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="a script, and its arguments",
    )


def list_recipes(arguments: argparse.Namespace) -> int:
    """Prints the recipes, the default one first, or the arguments of one."""
    if arguments.recipe is not None:
        print(find_recipe(arguments.recipe).description())
        print(
            "Fields of its config, which can be set too, such as precision=bfloat16: weft config "
            f"show {arguments.recipe}"
        )
        return 0
    recipes = named_trainer_configs().values()
    width = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        default = " (the default)" if recipe == RECIPES[0] else ""
        print(f"{recipe.name:{width}}  {recipe.summary}{default}")
        names = " ".join(f"{name}=" for name in recipe.written_arguments())
        print(f"{'':{width}}  {names}".rstrip())
    print(
        "\nweft recipes NAME explains the arguments of one. All take fields of their config too,"
    )
    print("such as max_step=100 and precision=bfloat16 (or mixed_bfloat16).")
    return 0
