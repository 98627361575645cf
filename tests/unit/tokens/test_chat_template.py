"""Templates: what they may use, what they may not, and what stops them."""

import itertools
import math
import time
from datetime import datetime

import pytest

from coordinator.core.errors import BadRequest
from coordinator.tokens import template
from coordinator.tokens.messages import plain_messages
from coordinator.tokens.template import ChatTemplate

USER = [{"role": "user", "content": "<hi> & 'you'"}]


def render(source, messages=USER, *, deadline_s=math.inf, clock=time.monotonic, **more):
    made = ChatTemplate({"default": source}, {"bos_token": "<s>"}, clock)
    return made.render(
        {"messages": messages, "tools": None, "add_generation_prompt": True, **more}, deadline_s=deadline_s
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s><hi> & 'you'"),
        ("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}", "x\n"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<hi> & \'you\'"}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": "é"\n}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(true, sort_keys=true) }}", '{"a": "\\u00e9", "b": 1}'),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ loop.index }}{{ loop.last }}{% endfor %}",
         "1False2False3False"),
        ("{% for k, v in messages[0].items() %}{{ k }},{% endfor %}{{ nothing }}", "role,content,"),
        ("{% for m in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for m in nothing %}x{% endfor %}-", "-"),
        ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('a') }}", "aa"),
        ("{% set ns = namespace(n=0) %}{% for m in [1, 2] %}{% set ns.n = ns.n + m %}{% endfor %}{{ ns.n }}", "3"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{{ 'ab' * 3 }}{{ 2 ** 5 }}{{ [1] * 2 }}{{ 2 * 3 }}", "ababab32[1, 1]6"),
        ("{{ messages[0]['content'].split(' ')[0] | trim | upper }}", "<HI>"),
    ],
)  # fmt: skip
def test_templates_write_what_transformers_lets_them(source, text):
    assert render(source) == text


def test_the_date_is_there():
    before = datetime.now().year  # noqa: DTZ005
    assert before <= int(render("{{ strftime_now('%Y') }}")) <= datetime.now().year  # noqa: DTZ005


def test_a_template_refuses_in_its_own_words():
    with pytest.raises(BadRequest, match="the model's chat template refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must\n alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__['x'] }}",
        "{{ raise_exception.__globals__.template }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% macro down() %}{{ down() }}{% endmacro %}{{ down() }}",
        "{{ range(10000000) | list }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ lipsum(n=1000000) }}",
    ],
)
def test_what_fails_or_is_not_allowed_is_a_bad_request(source):
    with pytest.raises(BadRequest, match="the model's chat template") as caught:
        render(source)
    assert "/etc" not in caught.value.message
    assert "globals" not in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [[1, 1]] recursive %}{% if loop.depth0 < 50 %}{{ loop([[1], [1]]) }}{% endif %}{% endfor %}",
        "{% set f = joiner() %}{% for a in range(99999) %}{% for b in range(99999) %}{{ f() }}{% endfor %}{% endfor %}",
    ],
    ids=["loops", "filtered loops", "macros", "recursive loop", "calls"],
)
def test_a_template_that_does_not_end_is_stopped(source):
    ticks = itertools.count()
    with pytest.raises(BadRequest, match="takes too long"):
        render(source, clock=lambda: next(ticks), deadline_s=20000)


def test_what_a_template_writes_is_bounded(monkeypatch):
    monkeypatch.setattr(template, "MOST_CHARS", 1000)
    assert len(render("{% for i in range(100) %}0123456789{% endfor %}")) == 1000
    with pytest.raises(BadRequest, match="makes too long a prompt"):
        render("{% for i in range(101) %}0123456789{% endfor %}")


@pytest.mark.parametrize(
    "source",
    ["{{ 'x' * 99999999999 }}", "{{ 99999999999 * [1] }}", "{{ 9 ** 9999999 }}", "{{ ('x' * 1000000) * 1000 }}"],
)
def test_values_are_bounded_too(source):
    with pytest.raises(BadRequest, match="makes too large a value"):
        render(source)


def test_threads_do_not_share_their_deadlines():
    made = ChatTemplate({"default": "{% for i in [1] %}x{% endfor %}"}, {}, lambda: 10.0)
    with pytest.raises(BadRequest):
        made.render({}, deadline_s=9.0)
    assert made.render({}, deadline_s=11.0) == "x"


# --- messages


def test_text_parts_become_text():
    parts = [{"type": "text", "text": "one"}, "two", {"type": "input_text", "text": "three"}]
    plain = plain_messages([{"role": "user", "content": parts, "name": "n"}, {"role": "assistant", "content": None}])
    assert plain == [
        {"role": "user", "content": "one\ntwo\nthree", "name": "n"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}], r"has a part that is no text"),
        ([{"type": "input_audio", "input_audio": {}}], r"has a part that is no text"),
        ([{"text": "kindless"}], r"has a part that is no text"),
        ([5], r"has a part that is no text"),
        ([{"type": "text"}], r"has a text part without text"),
        ([{"type": "text", "text": 5}], r"has a text part without text"),
        (5, r"must be a string or a list of parts"),
        ({"type": "text"}, r"must be a string or a list of parts"),
    ],
)
def test_content_that_is_no_text_is_refused(content, reason):
    with pytest.raises(BadRequest, match=rf"`messages\[1\]\.content` {reason}"):
        plain_messages([USER[0], {"role": "user", "content": content}])


def test_arguments_of_tool_calls_become_objects():
    def message(arguments):
        return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}

    def plain(arguments):
        return plain_messages([message(arguments)])[0]["tool_calls"][0]["function"]["arguments"]

    assert plain('{"a": [1]}') == {"a": [1]}
    assert plain("") == {}
    assert plain({"already": 1}) == {"already": 1}
    for broken in ("[1]", "{", "5"):
        with pytest.raises(BadRequest, match=r"`messages\[0\]\.tool_calls` has arguments that are no JSON object"):
            plain(broken)


def test_no_tool_calls_are_no_key_and_odd_ones_are_the_templates_business():
    assert "tool_calls" not in plain_messages([{"role": "assistant", "content": "x", "tool_calls": []}])[0]
    assert plain_messages([{"role": "assistant", "tool_calls": [5]}])[0]["tool_calls"] == [5]


def test_the_clients_messages_are_not_changed():
    given = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    plain_messages(given)
    assert given == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
