"""Values of JSON from elsewhere, and texts that are printed."""

import datetime

import pytest

from weft.serialization.untrusted import check_json, parse_json, printable, read_json_file

FORM = {
    "step": int,
    "loss?": float,
    "name?": (None, str),
    "on?": bool,
    "at?": datetime.datetime,
    "any?": {str: [int]},
    "list?": list,
}


@pytest.mark.parametrize(
    "value",
    [
        {"step": 0, "more": object()},
        {"step": 2**53, "loss": 1, "name": None, "on": True},
        {"step": 1, "loss": float("nan"), "at": "2026-11-28T08:00:00+00:00"},
        {"step": 1, "any": {"a": [1, 2], "b": []}, "list": [{}]},
    ],
)
def test_values_of_the_form(value):
    check_json(value, FORM)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([], r"^it is \[\]; expected an object$"),
        ({}, "^it has no 'step'$"),
        ({"step": -1}, "^step is -1; expected a count$"),
        ({"step": True}, "^step is True; expected a count$"),
        ({"step": 1.0}, r"^step is 1\.0; expected a count$"),
        ({"step": 2**53 + 1}, "^step is 9007199254740993; expected a count$"),
        ({"step": 1, "loss": "1"}, "^loss is '1'; expected a number$"),
        ({"step": 1, "loss": 2**2000}, "^loss is .*…; expected a number$"),
        ({"step": 1, "name": 1}, "^name is 1; expected null or a text$"),
        ({"step": 1, "on": 1}, "^on is 1; expected true or false$"),
        ({"step": 1, "at": "soon"}, "^at is 'soon'; expected a time$"),
        ({"step": 1, "at": "0001-01-01T00:00:00"}, "^at is .*; expected a time$"),
        ({"step": 1, "any": {"a": [1, "2"]}}, r"^any\.a\[1\] is '2'; expected a count$"),
        ({"step": 1, "any": {"a": 1}}, r"^any\.a is 1; expected a list$"),
    ],
)
def test_other_values_are_named(value, why):
    with pytest.raises(ValueError, match=why):
        check_json(value, FORM)


def test_json_of_too_many_values_is_refused():
    with pytest.raises(ValueError, match="more than 33,554,432 values"):
        parse_json("[" + "," * (2**25 + 1) + "]")


def test_terminal_obeys_no_printed_text():
    commands = "".join(map(chr, (*range(9), 11, *range(13, 32), *range(127, 160), 0x202E, 0x2066)))
    shown = printable(commands + "\ud800")
    assert shown.isascii() and shown.isprintable() and "\\x1b" in shown and "\\ud800" in shown
    text = "żółw 木\u3000\u00a0👩\u200d💻 \t\r\n\n"
    assert printable(text) == text


def test_mark_of_utf8_is_not_part_of_json(tmp_path):
    data = b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r\n'
    assert parse_json(data) == {"a": "é"}
    (tmp_path / "config.json").write_bytes(data)
    assert read_json_file(tmp_path / "config.json") == {"a": "é"}
