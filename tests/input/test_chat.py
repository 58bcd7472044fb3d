"""Chat templates: what they write, what is learned, what is refused."""

import pickle
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

from weft.errors import ChatTemplateError, InputDatasetError, TokenizerError
from weft.input import chat_renderer
from weft.input.chat import ChatTemplate, encode_example
from weft.input.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()
CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2"},
]


def learned(template, messages=MESSAGES, **kwargs):
    """Returns the parts of the text that are learned."""
    ids, is_learned = ChatTemplate(template, {"eos_token": "</s>"}).encode_learned(
        messages, tokenizer=TOKENIZER, **kwargs
    )
    changes = np.flatnonzero(np.diff(is_learned, prepend=False, append=False))
    runs = [ids[start:end] for start, end in zip(changes[::2], changes[1::2], strict=True)]
    return [TOKENIZER.decode(run) for run in runs]


def test_turns_are_written():
    template = ChatTemplate(CHATML)
    text = template.render(MESSAGES[:1], add_generation_prompt=True)
    assert text == "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"
    ids = template.encode(MESSAGES[:1], tokenizer=TOKENIZER, add_generation_prompt=True)
    assert TOKENIZER.decode(ids) == text
    assert pickle.loads(pickle.dumps(template)).render(MESSAGES) == template.render(MESSAGES)


def test_final_message_is_continued():
    messages = [MESSAGES[0], {"role": "assistant", "content": "Sure, "}]
    text = ChatTemplate(CHATML).render(messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nSure, ")
    trimmed = ChatTemplate(CHATML.replace("content }}", "content | trim }}"))
    assert trimmed.render(messages, continue_final_message=True).endswith("assistant\nSure,")


def test_answers_are_learned_by_difference():
    assert learned(CHATML) == ["a1<|im_end|>\n", "a2<|im_end|>\n"]


def test_conversation_that_ends_with_a_token():
    template = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    assert learned(template) == ["a1<|im_end|>\n", "a2<|im_end|>\n</s>"]


def test_last_answer_with_more_than_the_others():
    content = "{% if loop.last and message.role == 'assistant' %}<think>{% endif %}"
    template = CHATML.replace("{{ message.content", content + "{{ message.content")
    assert learned(template) == ["a1<|im_end|>\n", "<think>a2<|im_end|>\n"]


@pytest.mark.parametrize("control", ["", "-", "+"])
def test_generation_blocks(control):
    answer = f"{{%{control} generation %}}{{{{ message.content }}}}!{{% endgeneration {control}%}}"
    template = CHATML.replace("{{ message.content }}", answer)
    assert learned(template) == ["q1!", "a1!", "q2!", "a2!"]
    # In a comment, or where it is not reached, a block is none.
    assert learned("{# {% generation %} #}" + CHATML) == ["a1<|im_end|>\n", "a2<|im_end|>\n"]
    macro = "{% macro say(text) %}{% generation %}{{ text }}{% endgeneration %}{% endmacro %}"
    template = macro + CHATML.replace("message.content", "say(message.content) | upper")
    assert learned(template) == ["Q1", "A1", "Q2", "A2"]


def test_named_templates():
    template = ChatTemplate({"default": "d", "tool_use": "t", "rag": "r"})
    assert template.render(MESSAGES) == "d"
    assert template.render(MESSAGES, tools=[{"name": "f"}]) == "t"
    assert template.named("rag").render(MESSAGES) == "r"
    with pytest.raises(ChatTemplateError, match=r"no chat template 'reg'\. Did you mean 'rag'"):
        template.named("reg")
    with pytest.raises(ChatTemplateError, match=r"no chat template 'default', only 'rag'; choose"):
        ChatTemplate({"rag": "r"}).render(MESSAGES)


def test_threads_share_the_process():
    texts = {}

    def render(i):
        for _ in range(5):
            texts[i] = ChatTemplate(f"{i} {{{{ messages[0].content }}}}").render(MESSAGES)

    threads = [threading.Thread(target=render, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {i: f"{i} q1" for i in range(4)}


FORK = """
import os
from weft.input import ChatTemplate
messages = [{"role": "user", "content": "x"}]
template = ChatTemplate("{{ messages[0].content }}")
template.render(messages)
child = os.fork()
print(template.render(messages), flush=True)
if child:
    assert os.waitpid(child, 0) == (child, 0)
    print(template.render(messages))
"""


def test_forks_have_a_process_each():
    output = subprocess.check_output([sys.executable, "-c", FORK], encoding="utf-8")
    assert output.split() == ["x"] * 3


BAD_TEMPLATES = {
    "{% if %}": r"Expected an expression, got 'end of statement block' \(line 1\)",
    "{{ raise_exception('roles must alternate\x1b[2J') }}": r"roles must alternate\\x1b\[2J$",
    "{{ messages[0].a.b }}": "'dict object' has no attribute 'a'",
    "{{ messages.append(1) }}": "access to attribute 'append' of 'list' object is unsafe",
    "{{ ''.__class__.__mro__ }}": "access to attribute '__class__' of 'str' object is unsafe",
    "{% include '/etc/passwd' %}": "no loader for this environment specified",
    "{% for i in range(10**9) %}{% endfor %}": "OverflowError: Range too big",
    "{{ 'a' * 10**10 }}": "it takes too much memory",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}": "writes more than 16,777,216 char",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "maximum recursion depth exceeded",
}


@pytest.mark.parametrize("source", BAD_TEMPLATES)
def test_bad_templates(source):
    match = f"^the chat template does not render this conversation: .*{BAD_TEMPLATES[source]}"
    with pytest.raises(ChatTemplateError, match=match):
        ChatTemplate(source).render(MESSAGES)
    # The process answers the next request.
    assert ChatTemplate("ok").render(MESSAGES) == "ok"


def test_endless_template(monkeypatch):
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    renderer = chat_renderer.Renderer()
    monkeypatch.setattr(chat_renderer, "_LIMITS", (1, 2**30, 2**24))
    marks = ("<", ">")
    with pytest.raises(
        ChatTemplateError, match=r"computes for more than 10 seconds on a conversation"
    ):
        renderer.render(loops, {}, marks)
    assert renderer.render("ok", {}, marks) == "ok"
    # Its end is not noticed before the next request.
    process = renderer._process
    assert process is not None
    process.kill()
    with pytest.raises(
        ChatTemplateError, match=r"process .* ended \(status -9\); expected at most"
    ):
        renderer.render("ok", {}, marks)
    assert renderer.render("ok", {}, marks) == "ok"
    renderer.stop()


BAD_SOURCES = [
    (None, "the chat template is of type NoneType; expected a string, or strings by name"),
    ({}, "the chat template is of type dict; expected a string"),
    ({"default": 1}, "the chat template 'default' is of type int; expected a string"),
    ("a" * (2**20 + 1), "has 1,048,577 characters; expected at most 1,048,576"),
]


@pytest.mark.parametrize(("source", "message"), BAD_SOURCES)
def test_bad_sources(source, message):
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source)


BAD_CONVERSATIONS = [
    ([], {}, r"messages=\[\] is not a conversation; expected a list of at least one dict"),
    ("hi", {}, r"messages='hi' is not a conversation"),
    (["hi"], {}, r"messages\[0\] is of type str; expected a dict of 'role' and 'content'"),
    ([{"content": "x"}], {}, r"messages\[0\] has \['content'\] and the role None; expected a str"),
    (MESSAGES, {"tools": "f"}, r"tools='f' are not tools; expected a list of JSON schemas"),
    (MESSAGES, {"tools": [print]}, r"tools\[0\] is of type builtin_function.*its JSON schema, a"),
    (MESSAGES, {"now": object()}, r"not JSON \(it has a value of type object\); write its mess"),
    (
        MESSAGES,
        {"continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt=True begins another; pass one of them",
    ),
    (
        [{"role": "assistant", "content": [{"type": "image"}]}],
        {"continue_final_message": True},
        "the last message has no text to continue",
    ),
]


@pytest.mark.parametrize(("messages", "kwargs", "message"), BAD_CONVERSATIONS)
def test_bad_conversations(messages, kwargs, message):
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(CHATML).render(messages, **kwargs)


def test_content_that_is_not_written():
    with pytest.raises(ChatTemplateError, match="does not write the content of the last message"):
        ChatTemplate("x").render(MESSAGES, continue_final_message=True)


def test_answers_that_cannot_be_told():
    with pytest.raises(ChatTemplateError, match=r"turns of 'user', and none of the role 'assista"):
        learned(CHATML, MESSAGES[:1])
    with pytest.raises(ChatTemplateError, match=r"messages\[0\] is of the assistant, and .* put a"):
        learned(CHATML, MESSAGES[1:])
    numbered = "{{ messages | length }} turns: " + CHATML
    with pytest.raises(
        ChatTemplateError, match=r"writes messages\[1\] in another way .*put \{% ge"
    ):
        learned(numbered)


class Plain:
    """A tokenizer of a user, for documents."""

    eos_id, pad_id, vocab_size = 256, 257, 258
    token_num_bytes = np.ones(258, np.int32)

    def encode(self, text):
        return TOKENIZER.encode(text)

    def decode(self, ids):
        return TOKENIZER.decode(ids)


def test_tokenizer_without_special_tokens():
    with pytest.raises(TokenizerError, match=r"its method `encode` has no argument `parse_special"):
        ChatTemplate(CHATML).encode(MESSAGES, tokenizer=Plain())


ROWS = [
    ({"messages": MESSAGES[:2]}, "a1<|im_end|>\n"),
    ({"prompt": "q1", "completion": "a1"}, "a1<|im_end|>\n"),
    ({"prompt": "q1", "response": "a1", "completion": None}, "a1<|im_end|>\n"),
    ({"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}, "a2<|im_end|>\n"),
    ({"prompt": np.array(MESSAGES[:1]), "completion": np.array(MESSAGES[1:2])}, "a1<|im_end|>\n"),
]


@pytest.mark.parametrize(("row", "answer"), ROWS)
def test_rows(row, answer):
    tokens = encode_example(row, tokenizer=TOKENIZER, template=ChatTemplate(CHATML))
    assert TOKENIZER.decode(tokens.ids[tokens.is_learned]) == answer
    assert TOKENIZER.decode(tokens.ids).startswith("<|im_start|>user\nq1<|im_end|>\n")


def test_rows_of_plain_text():
    tokens = encode_example({"text": "ab"}, tokenizer=TOKENIZER)
    assert (tokens.ids.tolist(), tokens.is_learned.tolist()) == ([97, 98, 256], [True] * 3)
    tokens = encode_example({"prompt": "a", "completion": "b"}, tokenizer=TOKENIZER)
    assert (tokens.ids.tolist(), tokens.is_learned.tolist()) == ([97, 98, 256], [False, True, True])


def test_fields_that_other_rows_have():
    template = ChatTemplate(
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{% if m.tool_calls is defined %}"
        "{{ m.tool_calls | tojson }}{% endif %}{{ m.content }}{% endfor %}"
    )
    messages = [{**message, "tool_calls": None} for message in MESSAGES[:2]]
    for tools in ['[{"name": "é"}]', [{"name": "é"}]]:
        tokens = encode_example(
            {"messages": messages, "tools": tools}, tokenizer=TOKENIZER, template=template
        )
        assert TOKENIZER.decode(tokens.ids) == '[{"name": "é"}]userq1assistanta1'


BAD_ROWS = [
    (7, InputDatasetError, "the row is of type int; expected 'messages'; 'prompt' with"),
    ({"a": 1}, InputDatasetError, r"the row has \['a'\]; expected 'messages'; 'prompt' with 'com"),
    ({"messages": []}, InputDatasetError, r"'messages' of the row is \[\]; expected a list of at"),
    ({"messages": [1]}, InputDatasetError, r"messages\[0\] of the row is of type int; expected"),
    ({"prompt": "a"}, InputDatasetError, "a 'prompt' and no answer to it, it has .*expected a 'c"),
    ({"prompt": "a", "completion": [1]}, InputDatasetError, "'completion' of type list; expected"),
    ({"text": 7}, InputDatasetError, "'text' of the record is of type int; expected a string"),
    ({"messages": MESSAGES, "tools": "["}, InputDatasetError, r"'tools' of the row is not JSON"),
    ({"messages": MESSAGES, "tools": 7}, ChatTemplateError, "tools=7 are not tools; expected a"),
]


@pytest.mark.parametrize(("row", "error", "message"), BAD_ROWS)
def test_bad_rows(row, error, message):
    with pytest.raises(error, match=message):
        encode_example(row, tokenizer=TOKENIZER, template=ChatTemplate(CHATML))


def test_answers_that_say_nothing():
    template = ChatTemplate(CHATML)
    for content in ("", " \n", None, []):
        messages = [*MESSAGES[:3], {"role": "assistant", "content": content}]
        with pytest.raises(InputDatasetError, match="'messages' of the row has an answer of the"):
            encode_example({"messages": messages}, tokenizer=TOKENIZER, template=template)
        messages[3]["tool_calls"] = [{"name": "f"}]
        encode_example({"messages": messages}, tokenizer=TOKENIZER, template=template)
    silent = ChatTemplate(
        "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(InputDatasetError, match="nothing of the row is learned: after its prompt"):
        encode_example({"messages": MESSAGES[:2]}, tokenizer=TOKENIZER, template=silent)


def test_results_of_tools_may_be_any_json():
    messages = [{"role": "tool", "content": {"sum": 5}}, *MESSAGES]
    tokens = encode_example(
        {"messages": messages}, tokenizer=TOKENIZER, template=ChatTemplate(CHATML)
    )
    assert TOKENIZER.decode(tokens.ids).startswith("<|im_start|>tool\n{'sum': 5}<|im_end|>")


def test_messages_without_a_template():
    message = "no chat template to write them; pass template=, such as that of weft.interop.load_"
    with pytest.raises(InputDatasetError, match=re.escape(message)):
        encode_example({"messages": MESSAGES}, tokenizer=TOKENIZER)


def test_prompt_that_its_completion_changes():
    template = ChatTemplate("{{ messages | length }}" + CHATML)
    row = {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}
    with pytest.raises(ChatTemplateError, match="in another way when other turns follow"):
        encode_example(row, tokenizer=TOKENIZER, template=template)
