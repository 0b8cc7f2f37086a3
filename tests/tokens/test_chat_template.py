"""Chat templates render as transformers renders them."""

import pytest

from backends.chat_template import ChatTemplate
from backends.protocol import Refused

HELLO = [{"role": "user", "content": "<Hello> & é"}]


def render(source: str, **names: object) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(HELLO, settings=names)


def test_names_and_settings() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}|{{ tools is none }}|{{ documents }}|{{ enable_thinking }}|"
    assert render(source + "{{ add_generation_prompt }}", enable_thinking=False) == (
        "<s><Hello> & é|True|None|False|True"
    )


def test_settings_cannot_stand_in_for_messages() -> None:
    assert render("{{ messages | length }}", messages=[1, 2, 3]) == "1"


def test_json_is_not_escaped_for_pages() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "<Hello> & é"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}") == '{"a":2,"b":1}'


def test_blocks_are_trimmed_and_loops_controlled() -> None:
    assert render("  {% for one in [1, 2, 3] %}\n{% if one == 2 %}{% break %}{% endif %}\n{{ one }}\n{% endfor %}") == (
        "1\n"
    )


def test_marks_of_training_are_no_text() -> None:
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"


def test_dates() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses|may not"),
        ("{{ ''.__class__.__mro__ }}", "refuses|may not"),
        ("{{ 1 + 'a' }}", "refuses"),
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(source: str, says: str) -> None:
    with pytest.raises(Refused, match=says) as caught:
        render(source)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_request", "messages")
