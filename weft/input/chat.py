r"""Chat templates: conversations as the text and the tokens that a model was trained on.

    tokenizer, template = weft.interop.load_tokenizer("llama-3.2-1b-instruct")
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    prompt = template.encode(messages, tokenizer=tokenizer, add_generation_prompt=True)

A template is a jinja2 template in the form of Hugging Face's transformers. It comes with a
tokenizer, as data of a stranger: it is rendered in jinja2's sandbox, in a process of its own. A
conversation may take 10 seconds of a core and 1 GiB of memory, and be 16 million characters long.
"""

import dataclasses
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeGuard

import numpy as np
from jaxtyping import Bool, Int32

from weft.errors import (
    ChatTemplateError,
    InputDatasetError,
    TokenizerError,
    did_you_mean,
)
from weft.input.chat_renderer import RENDERER
from weft.input.file_cache import document_text
from weft.input.tokenizers import (
    HuggingFaceTokenizer,
    PromptTokenizer,
    Tokenizer,
    encode_prompt,
    parses_special,
    without_bos,
)
from weft.serialization.untrusted import parse_json

Message = Mapping[str, object]
"""A turn: `role`, `content` (a string, or a list of parts), and what else a template reads."""

_MAX_SOURCE_CHARACTERS = 2**20
_ASSISTANT = "assistant"


class LearnedTokens(NamedTuple):
    """Tokens of a conversation or text, and which of them a model learns.

    Attributes:
        ids: The tokens.
        is_learned: Whether the loss counts the prediction of each of them.
    """

    ids: Int32[np.ndarray, " tokens"]
    is_learned: Bool[np.ndarray, " tokens"]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    r"""Template that writes conversations, as of a `tokenizer_config.json`.

    Args:
        source: The template, or several by name: "default", "tool_use" for conversations with
            tools, and others for `named`.
        special_tokens: What `bos_token`, `eos_token` and others are in the template.

    Raises ChatTemplateError if the source is not text.

    >>> template = ChatTemplate(
    ...     "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    ...     "{% if add_generation_prompt %}<assistant>{% endif %}",
    ...     {"eos_token": "\n"},
    ... )
    >>> messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    >>> template.render(messages)
    '<user>Hi\n<assistant>Hello\n'
    >>> from weft.input.tokenizers import ByteTokenizer
    >>> tokens = template.encode_learned(messages, tokenizer=ByteTokenizer())
    >>> bytes(tokens.ids[tokens.is_learned].tolist())
    b'Hello\n'
    """

    source: str | Mapping[str, str]
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        sources = self.source
        if isinstance(sources, str):
            sources = {"default": sources}
        if not isinstance(sources, Mapping) or not sources:
            raise ChatTemplateError(
                f"the chat template is of type {type(self.source).__name__}; expected a string, or "
                "strings by name"
            )
        for name, source in sources.items():
            if not isinstance(source, str):
                raise ChatTemplateError(
                    f"the chat template {name!r} is of type {type(source).__name__}; expected a "
                    "string"
                )
            if len(source) > _MAX_SOURCE_CHARACTERS:
                raise ChatTemplateError(
                    f"the chat template {name!r} has {len(source):,} characters; expected at most "
                    f"{_MAX_SOURCE_CHARACTERS:,}"
                )

    def named(self, name: str) -> "ChatTemplate":
        """Returns the one of several templates that has this name.

        Raises ChatTemplateError if there is none.
        """
        sources = self.source
        if isinstance(sources, str):
            sources = {"default": sources}
        if name not in sources:
            raise ChatTemplateError(
                f"there is no chat template {name!r}. {did_you_mean(name, sources)}"
            )
        return dataclasses.replace(self, source=sources[name])

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str:
        """Returns the text of a conversation.

        Args:
            messages: Its turns. Their content may be a list of parts, such as
                `{"type": "text", "text": "Hi"}`, if the template reads such.
            tools: The JSON schemas of functions that the assistant may call.
            documents: What the assistant may read, such as dicts of `title` and `text`.
            add_generation_prompt: Whether to begin a turn of the assistant at the end.
            continue_final_message: Whether to leave the last turn open, to be continued.
            **variables: Further variables of the template, such as `enable_thinking`.

        Raises ChatTemplateError if the template is wrong, refuses the conversation, or reaches a
        limit.
        """
        _check_messages(messages)
        if tools is not None:
            tools = _checked_tools(tools)
        mark = ""
        if continue_final_message:
            if add_generation_prompt:
                raise ChatTemplateError(
                    "continue_final_message=True leaves the last turn open, and "
                    "add_generation_prompt=True begins another; pass one of them"
                )
            mark = _new_mark()
            messages = [*messages[:-1], _with_mark(messages[-1], mark)]
        text, _ = self._render_with_spans(
            {
                "messages": messages,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                **variables,
            }
        )
        if mark:
            return _until_mark(text, mark)
        return text

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: object,
    ) -> Int32[np.ndarray, " tokens"]:
        """Returns the tokens of a conversation, equal to those of transformers.

        The arguments are those of `render`. No token is put before the text: templates write the
        tokens that begin one themselves.

        Raises ChatTemplateError, see `render`, and TokenizerError if the tokenizer's `encode` has
        no argument `parse_special`.
        """
        text = self.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        return encode_prompt(_chat_tokenizer(tokenizer), text)

    def encode_learned(
        self,
        messages: Sequence[Message],
        *,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> LearnedTokens:
        """Returns the tokens of a conversation, and which of them the assistant wrote.

        These are the tokens with a character in a block `{% generation %}`, if the template has
        any. Otherwise, an answer is what the template writes for the turns up to it after what it
        writes as the prompt for it: its text, and the end of the turn.

        Raises ChatTemplateError, as `render`; if there is no turn of the assistant; or if the
        template has no such block and writes turns in another way when more turns follow.
        """
        _check_messages(messages)
        if not any(message["role"] == _ASSISTANT for message in messages):
            raise ChatTemplateError(
                f"the conversation has turns of {_roles(messages)}, and none of the role "
                f"{_ASSISTANT!r}, so there is nothing to learn; leave it out"
            )
        if tools is not None:
            tools = _checked_tools(tools)
        constants = {
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": False,
            **variables,
        }
        text, spans = self._render_with_spans(
            {**constants, "messages": messages}
        )
        if not spans:
            spans = self._answer_spans(text, messages, constants)
        return _learned_tokens(_chat_tokenizer(tokenizer), text, spans)

    def _source(self, tools: object) -> str:
        if isinstance(self.source, str):
            return self.source
        if tools is not None and "tool_use" in self.source:
            return self.source["tool_use"]
        if "default" not in self.source:
            names = ", ".join(map(repr, self.source))
            raise ChatTemplateError(
                f"there is no chat template 'default', only {names}; choose one by "
                "template.named(name)"
            )
        return self.source["default"]

    def _render_with_spans(
        self, variables: Mapping[str, object]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text, and the start and end of each `{% generation %}` in it."""
        marks = (_new_mark(), _new_mark())
        marked_text = RENDERER.render(
            self._source(variables["tools"]),
            {**self.special_tokens, **variables},
            marks,
        )
        start_mark, end_mark = marks
        parts: list[str] = []
        spans: list[tuple[int, int]] = []
        num_characters = 0
        start = 0
        for part in re.split(f"({start_mark}|{end_mark})", marked_text):
            if part == start_mark:
                start = num_characters
            elif part == end_mark:
                spans.append((start, num_characters))
            else:
                parts.append(part)
                num_characters += len(part)
        return "".join(parts), spans

    def _answer_spans(
        self,
        text: str,
        messages: Sequence[Message],
        constants: Mapping[str, object],
    ) -> list[tuple[int, int]]:
        """Returns where the turns of the assistant are in the text, by rendering parts of it."""

        def render(
            some_messages: Sequence[Message], *, prompts: bool = False
        ) -> str:
            variables = {**constants, "messages": some_messages}
            if prompts:
                variables["add_generation_prompt"] = True
            return self._render_with_spans(variables)[0]

        spans: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] != _ASSISTANT:
                continue
            if i == 0:
                raise ChatTemplateError(
                    "messages[0] is of the assistant, and the chat template has no block "
                    "{% generation %}, so where its answer begins cannot be told; put a turn of "
                    "the user before it, or the block into the template"
                )
            prompt = render(messages[:i], prompts=True)
            if not text.startswith(prompt):
                raise ChatTemplateError(_NO_PREFIX.format(index=i))
            end = self._answer_end(text, messages, i, render)
            if end is None or end < len(prompt):
                raise ChatTemplateError(_NO_PREFIX.format(index=i))
            spans.append((len(prompt), end))
        return spans

    def _answer_end(
        self,
        text: str,
        messages: Sequence[Message],
        index: int,
        render: Callable[[Sequence[Message]], str],
    ) -> int | None:
        """Returns where the turn of this index ends in the text, None if it cannot be told."""
        turns = render(messages[: index + 1])
        if text.startswith(turns):
            return len(turns)
        # Some templates end each conversation with the token.
        eos_token = self.special_tokens.get("eos_token", "")
        turns = turns.removesuffix(eos_token)
        if text.startswith(turns):
            return len(turns)
        # Some write the last answer in another way, such as with its reasoning. What the text has
        # more than without this answer is the answer.
        text_before = render(messages[:index]).removesuffix(eos_token)
        try:
            text_without = render([*messages[:index], *messages[index + 1 :]])
        except ChatTemplateError:  # which may want roles to alternate
            return None
        end = len(text_before) + len(text) - len(text_without)
        if text_without == text[: len(text_before)] + text[end:]:
            return end
        return None


def encode_example(
    example: Mapping[str, object],
    *,
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
) -> LearnedTokens:
    r"""Returns the tokens of a row of data; those of its answers are learned.

    Args:
        example: One of

            - `messages`, a list of turns, and maybe `tools`, a list of JSON schemas or its JSON;
            - `prompt` with `completion` or `response`: two texts, or two lists of turns;
            - `text`, all of it learned.
        template: Writes turns. A prompt that is a text is a turn of the user, its completion one
            of the assistant. None: such texts follow each other without more between them; the
            tokens that begin a text, if the tokenizer has any, precede them, and `eos_id` follows.

    Raises InputDatasetError for another row or one with an empty answer, and ChatTemplateError, see
    `ChatTemplate`.

    >>> from weft.input.tokenizers import ByteTokenizer
    >>> row = {"prompt": "1 + 1 = ", "completion": "2"}
    >>> tokens = encode_example(row, tokenizer=ByteTokenizer())
    >>> tokens.ids[tokens.is_learned].tolist()
    [50, 256]
    """
    if not isinstance(example, Mapping):
        raise InputDatasetError(
            f"the row is of type {type(example).__name__}; {_EXPECTED_ROW}"
        )
    if example.get("messages") is not None:
        messages = row_messages(example, "messages")
        check_says_something(example, "messages")
        return _encode_turns(example, [], messages, tokenizer, template)
    if example.get("prompt") is None:
        if example.get("text") is None:
            raise InputDatasetError(
                f"the row has {sorted(map(str, example))}; {_EXPECTED_ROW}"
            )
        text = document_text(example, "text")
        check_says_something(example, "text")
        return plain_tokens(tokenizer, "", text)
    for key in ("completion", "response"):
        if example.get(key) is not None:
            tokens = encode_answer(
                example, key, tokenizer=tokenizer, template=template
            )
            check_says_something(example, key)
            return tokens
    raise InputDatasetError(
        f"the row has a 'prompt' and no answer to it, it has {sorted(map(str, example))}; "
        "expected a 'completion' or 'response', too"
    )


def encode_answer(
    row: Mapping[str, object],
    key: str,
    *,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
) -> LearnedTokens:
    """Returns the tokens of the `prompt` of a row with an answer, which alone is learned.

    Args:
        key: The field of the answer.

    Other arguments and errors are those of `encode_example`.
    """
    prompt, answer = row["prompt"], row[key]
    if isinstance(prompt, str) and isinstance(answer, str):
        if template is None:
            return plain_tokens(tokenizer, prompt, answer)
        turns = [
            {"role": "user", "content": prompt},
            {"role": _ASSISTANT, "content": answer},
        ]
        return _encode_turns(row, [], turns, tokenizer, template)
    if not (_is_list(prompt) and _is_list(answer)):
        raise InputDatasetError(
            f"'prompt' of the row is of type {type(prompt).__name__}, and {key!r} of type "
            f"{type(answer).__name__}; expected two strings, or two lists of messages"
        )
    question, completion = row_messages(row, "prompt"), row_messages(row, key)
    if completion[: len(question)] == question:
        raise InputDatasetError(
            f"{key!r} of the row begins with the turns of 'prompt', so that the model would read "
            f"them twice; leave them out of {key!r}"
        )
    if not any(turn.get("role") == _ASSISTANT for turn in completion):
        raise InputDatasetError(
            f"{key!r} of the row has no turn of the role {_ASSISTANT!r}, so there is nothing to "
            "learn; leave the row out"
        )
    if {question[-1].get("role"), completion[0].get("role")} == {_ASSISTANT}:
        raise InputDatasetError(
            f"'prompt' of the row ends with a turn of the assistant, and {key!r} begins with "
            "another; leave the last turn of 'prompt' out"
        )
    return _encode_turns(row, question, completion, tokenizer, template)


def check_says_something(row: Mapping[str, object], key: str) -> None:
    """Raises InputDatasetError if a text or an answer of the assistant in a field is empty."""
    value = row[key]
    if _is_list(value):
        is_empty = any(map(_is_empty_answer, value))
        fault = "has an answer of the assistant that is empty"
    else:
        is_empty = isinstance(value, str | bytes) and not value.strip()
        fault = "is empty"
    if is_empty:
        raise InputDatasetError(
            f"{key!r} of the row {fault}, so that the model would learn to say nothing; leave the "
            "row out"
        )


def _is_empty_answer(message: object) -> bool:
    """Returns whether a turn of the assistant has neither content nor, say, calls of tools."""
    if not isinstance(message, Mapping) or message.get("role") != _ASSISTANT:
        return False
    fields = {**message, "role": None, "name": None}
    content = fields.get("content")
    if isinstance(content, str):
        fields["content"] = content.strip()
    return not any(fields.values())


def _encode_turns(
    example: Mapping[str, object],
    prompt: Sequence[Message],
    completion: Sequence[Message],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
) -> LearnedTokens:
    """Returns the tokens of a conversation whose first turns, the prompt, are not learned."""
    template = checked_template(template)
    tools = _row_tools(example)
    tokens = template.encode_learned(
        [*prompt, *completion], tokenizer=tokenizer, tools=tools
    )
    if any(message["role"] == _ASSISTANT for message in prompt):
        prompt_ids = template.encode(
            prompt, tokenizer=tokenizer, tools=tools, add_generation_prompt=True
        )
        if not np.array_equal(tokens.ids[: len(prompt_ids)], prompt_ids):
            raise ChatTemplateError(_NO_PREFIX.format(index=len(prompt)))
        tokens.is_learned[: len(prompt_ids)] = False
    if not tokens.is_learned.any():
        raise InputDatasetError(
            "nothing of the row is learned: after its prompt, the chat template writes nothing "
            "that the assistant says; expected a turn of the assistant, and a template that "
            "writes it"
        )
    return tokens


def checked_template(template: ChatTemplate | None) -> ChatTemplate:
    """Returns the template for a row of messages; raises InputDatasetError if there is none."""
    if template is None:
        raise InputDatasetError(
            "the row has messages, but there is no chat template to write them; pass template=, "
            "such as that of weft.interop.load_tokenizer(folder)"
        )
    return template


_EXPECTED_ROW = (
    "expected 'messages'; 'prompt' with 'completion' or 'response'; or 'text'"
)
# Results of tools may be any JSON.
_TALKING_ROLES = ("system", "user", _ASSISTANT)


def row_messages(
    example: Mapping[str, object], key: str
) -> list[dict[str, object]]:
    """Returns messages without the fields that a table has for others of them.

    Raises InputDatasetError for another list, and for content that is not text.
    """
    messages = example[key]
    if not _is_list(messages) or len(messages) == 0:
        raise InputDatasetError(
            f"{key!r} of the row is {messages!r:.100}; expected a list of at least one dict of "
            "'role' and 'content'"
        )
    turns: list[dict[str, object]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputDatasetError(
                f"{key}[{i}] of the row is of type {type(message).__name__}; expected a dict of "
                "'role' and 'content'"
            )
        fields: dict[str, object] = {}
        for name, value in message.items():
            if value is not None or name == "content":
                fields[name] = value
        _check_content(fields, f"{key}[{i}]")
        turns.append(fields)
    return turns


def _check_content(message: Mapping[str, object], name: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in _TALKING_ROLES or isinstance(content, str):
        return
    if content is None and role == _ASSISTANT:  # which may call tools
        return
    if not _is_list(content):
        raise InputDatasetError(
            f"'content' of {name} of the row is {content!r:.60}; expected a string, or a list of "
            "parts, such as {'type': 'text', 'text': 'Hi'}"
        )


def _row_tools(
    example: Mapping[str, object],
) -> Sequence[Mapping[str, object]] | None:
    tools = example.get("tools")
    if isinstance(tools, str):
        try:
            tools = parse_json(tools) if tools else None
        except ValueError as error:
            raise InputDatasetError(
                f"'tools' of the row is not JSON ({error}); expected a list of JSON schemas"
            ) from error
    return None if tools is None else _checked_tools(tools)


def plain_tokens(
    tokenizer: Tokenizer, prompt: str, answer: str | bytes
) -> LearnedTokens:
    """Returns the tokens of two texts, and the end; the text is that of a document."""
    tokenizer = without_bos(tokenizer)
    bos_ids = np.array(getattr(tokenizer, "bos_ids", ()), np.int32)
    context_ids = np.append(bos_ids, tokenizer.encode(prompt))
    answer_ids = np.append(tokenizer.encode(answer), tokenizer.eos_id)
    is_learned = np.ones(len(context_ids) + len(answer_ids), bool)
    is_learned[: len(context_ids)] = False
    ids = np.append(context_ids, answer_ids).astype(np.int32)
    return LearnedTokens(ids, is_learned)


_NO_PREFIX = (
    "the chat template writes messages[{index}] in another way when other turns follow, so which "
    "tokens are the assistant's cannot be told. In the template, put {{% generation %}} and "
    "{{% endgeneration %}} around what the assistant writes; or train on conversations that end "
    "with their first answer"
)


def _check_messages(messages: object) -> None:
    if not _is_list(messages) or len(messages) == 0:
        raise ChatTemplateError(
            f"messages={messages!r:.100} is not a conversation; expected a list of at least one "
            "dict of 'role' and 'content'"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatTemplateError(
                f"messages[{i}] is of type {type(message).__name__}; expected a dict of 'role' and "
                "'content'"
            )
        if not isinstance(message.get("role"), str):
            raise ChatTemplateError(
                f"messages[{i}] has {sorted(map(str, message))} and the role "
                f"{message.get('role')!r:.100}; expected a string, such as 'user' or 'assistant'"
            )


def _checked_tools(tools: object) -> Sequence[Mapping[str, object]]:
    if not _is_list(tools):
        raise ChatTemplateError(
            f"tools={tools!r:.100} are not tools; expected a list of JSON schemas, which are dicts"
        )
    schemas: list[Mapping[str, object]] = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ChatTemplateError(
                f"tools[{i}] is of type {type(tool).__name__}; expected its JSON schema, a dict "
                "such as {'type': 'function', 'function': {'name': …, 'parameters': …}}"
            )
        schemas.append(tool)
    return schemas


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    is_sequence = isinstance(value, Sequence) and not isinstance(
        value, str | bytes
    )
    return is_sequence or (isinstance(value, np.ndarray) and value.ndim == 1)


def _roles(messages: Iterable[Message]) -> str:
    roles = dict.fromkeys(repr(message["role"]) for message in messages)
    return ", ".join(roles)


def _new_mark() -> str:
    """Returns a string that no template or message has, and that no filter of jinja2 changes."""
    return f"\ue000{secrets.randbelow(10**16):016}\ue001"


def _with_mark(message: Message, mark: str) -> dict[str, object]:
    """Returns a message whose text ends with a mark, and a space to see if that is kept."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": f"{content}{mark} "}
    if _is_list(content):
        parts = list(content)
        for i, part in reversed(list(enumerate(parts))):
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                parts[i] = {**part, "text": f"{part['text']}{mark} "}
                return {**message, "content": parts}
    raise ChatTemplateError(
        "continue_final_message=True, but the last message has no text to continue; expected "
        "'content' that is a string, or has a part with 'text'"
    )


def _until_mark(text: str, mark: str) -> str:
    index = text.rfind(mark)
    if index == -1:
        raise ChatTemplateError(
            "continue_final_message=True, but the chat template does not write the content of the "
            "last message"
        )
    if text.startswith(f"{mark} ", index):
        return text[:index]
    # The template removes spaces at the end of a message.
    return text[:index].rstrip()


def _chat_tokenizer(tokenizer: Tokenizer) -> PromptTokenizer:
    tokenizer = without_bos(tokenizer)
    if not parses_special(tokenizer):
        raise TokenizerError(
            f"{tokenizer!r} cannot encode a chat template: its method `encode` has no argument "
            "`parse_special`. Add `parse_special: bool = False`, with which the special tokens "
            "that a text spells become their ids"
        )
    return tokenizer


def _learned_tokens(
    tokenizer: PromptTokenizer, text: str, spans: Iterable[tuple[int, int]]
) -> LearnedTokens:
    """Returns the tokens of a text; those with a character in a span are learned."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        ids, offsets = tokenizer.encode_with_offsets(text)
        is_learned = np.zeros(len(ids), bool)
        for start, end in spans:
            is_learned |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
        return LearnedTokens(ids, is_learned)
    ids = encode_prompt(tokenizer, text)
    is_learned = np.zeros(len(ids), bool)
    for start, end in spans:
        first = _num_common_tokens(tokenizer, ids, text[:start])
        last = _num_common_tokens(tokenizer, ids, text[:end])
        is_learned[first:last] = True
    return LearnedTokens(ids, is_learned)


def _num_common_tokens(
    tokenizer: PromptTokenizer, ids: np.ndarray, prefix: str
) -> int:
    """Returns how many of the ids of a text are also the first ones of its prefix."""
    prefix_ids = tokenizer.encode(prefix, parse_special=True)[: len(ids)]
    differences = np.flatnonzero(ids[: len(prefix_ids)] != prefix_ids)
    if len(differences) == 0:
        return len(prefix_ids)
    return int(differences[0])
