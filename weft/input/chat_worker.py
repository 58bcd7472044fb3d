"""Program that renders chat templates, in a process of its own: it may be ended at any time.

Each line that it reads is a request in JSON, each that it writes the reply:

    {"source": …, "variables": {…}, "marks": […]}
    {"text": …}  or  {"error": …}

Its arguments are the seconds of a core that a request may take, the bytes of memory of the process,
and the characters of a text. A template is a stranger's: jinja2's sandbox keeps it from Python's
objects, and the system keeps it within these limits. The program imports nothing of Weft.
"""

import contextlib
import datetime
import functools
import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}`, whose text the model is to learn.

    It is the same text between two marks, which the reader finds and removes.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(
            ("name:endgeneration",), drop_needle=True
        )
        call = self.call_method("_marked", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(
        self, context: jinja2.runtime.Context, caller: Callable[[], str]
    ) -> str:
        start, end = context["generation_marks"]
        return f"{start}{caller()}{end}"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON; jinja2's own filter also replaces characters of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()


@functools.lru_cache(maxsize=8)
def _template(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)


def _render(request: dict[str, Any], max_characters: int) -> str:
    variables = {**request["variables"], "generation_marks": request["marks"]}
    parts: list[str] = []
    num_characters = 0
    for part in _template(request["source"]).generate(variables):
        num_characters += len(part)
        if num_characters > max_characters:
            raise jinja2.TemplateError(
                f"it writes more than {max_characters:,} characters"
            )
        parts.append(part)
    return "".join(parts)


def _reply(line: bytes, max_characters: int) -> dict[str, str]:
    try:
        return {"text": _render(json.loads(line), max_characters)}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"{error.message} (line {error.lineno})"}
    except jinja2.TemplateError as error:
        return {"error": error.message or type(error).__name__}
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answers requests until there are no more."""
    max_seconds, max_bytes, max_characters = map(int, sys.argv[1:])
    # Not all systems limit the memory of a process.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    # At the end of the time, the signal ends the process, whatever its parent does about it.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        reply = _reply(line, max_characters)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
