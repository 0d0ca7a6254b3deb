import time
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from app.text.limits import LimitExceeded, Meter
from app.text.sandbox import MAX_TEMPLATE_BYTES, ChatTemplate

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be <b>brief</b> & kind. "},
    {"role": "user", "content": "Was heißt 你好?\nZweite Zeile 🙂"},
    {"role": "assistant", "content": "<think>hm</think>Hallo", "tool_calls": [{"function": {"name": "f", "n": 1.5}}]},
    {"role": "user", "content": "Danke"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
VARIABLES = {"messages": MESSAGES, "tools": TOOLS, "add_generation_prompt": True, "bos_token": "<s>", "flag": None}
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m.content | trim }}"
    "<|im_end|>\n{% endfor %}",
    "namespace": "{% set ns = namespace(last=-1, found=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% set ns.found = true %}{% endif %}{% endfor %}{{ ns.last }}{{ ns.found }}",
    "loops": "{% for m in messages if m.role != 'system' %}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
    "{% if loop.index > 1 %}{% break %}{% endif %}{% else %}none{% endfor %}",
    "nested": "{% for m in messages %}{% for k, v in m.items() %}{{ k ~ ':' ~ v }};{% endfor %}{% endfor %}",
    "recursive": "{% for x in [[1, [2]], [3]] recursive %}"
    "{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
    "macro": "{% macro say(x, y='b', z=[]) %}{{ x }}-{{ y }}{{ z | length }}{% endmacro %}"
    "{{ say('a') }}{{ say(1, y=2) }}",
    "caller": "{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}in{% endcall %}",
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=4) }}{{ {'ä': '<'} | tojson }}"
    "{{ [1, 2.5, none, true] | tojson }}"
    "{{ tools | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}",
    "strings": "{{ messages[2].content.split('</think>')[-1].lstrip('\n') }}{{ 'a,b'.replace(',', '; ') }}"
    "{{ ', '.join(['a', 'b']) }}{{ '{} {:>5}'.format('x', 2) }}{{ '%s|%5.1f' | format('x', 2.25) }}{{ '%d%%' % 50 }}"
    "{{ messages[1].content[:3] }}{{ 'x'.startswith('x') }}{{ 'Q w'.title() }}{{ 'ab'[::-1] }}{{ 'a' * 3 }}",
    "filters": "{{ messages | map(attribute='role') | join(', ') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ [3, 1, 2] | sort | first }}{{ messages[1].content | indent(2, true) }}"
    "{{ 'a\n\nb' | indent(width=3) }}"
    "{{ 'a\n' | indent(4, false, true) }}{{ missing | default('d') }}{{ '<' | e }}{{ [1, 2, 3] | batch(2) | list }}"
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ 'aXb' | replace('X', 'y') }}{{ ' x ' | trim }}{{ '5' | int + 1 }}",
    "sets": "{% set x %}block {{ flag }}{% endset %}{{ x }}{% set a, b = 1, 2 %}{{ a + b * 3 ** 2 % 4 - 1 }}"
    "{{ 7 // 2 }}"
    "{{ dict(a=1, **{'b': 2}) }}{{ (1, 'x') }}{{ [flag, none] }}{{ cycler('o', 'e').next() }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tests": "{{ flag is none }}{{ messages is string }}{{ messages[0] is mapping }}{{ x is defined }}"
    "{{ 'a' in ['a'] }}"
    "{{ 'role' in messages[0] }}{{ bos_token if add_generation_prompt else '' }}{{ not flag }}{{ 3 is divisibleby 3 }}",
    "control": "{%- if tools %}\n  yes\n{%- else %}no{% endif -%}\n\n  "
    "{{- raise_exception('no') if not messages -}}  end\n",
    "filter block": "{% filter upper %}a{{ bos_token }}{% endfilter %}{% with y = 2 %}{{ y }}{% endwith %}",
    "date": "{{ strftime_now('%d %b %Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    expected = chat_template_utils._compile_jinja_template(TEMPLATES[name]).render(**VARIABLES)
    assert ChatTemplate(TEMPLATES[name]).render(VARIABLES) == expected


BOMBS = {
    "endless loops": "{% set r = range(10000) %}{% for a in r %}{% for b in r %}"
    "{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
    "loop over text": "{% for a in big %}{% for b in big %}{% for c in big %}{% endfor %}{% endfor %}{% endfor %}",
    "filtered loops": "{% set r = range(10000) %}{% for a in r %}{% for b in r %}{% for c in r if false %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "long range": "{{ range(10001) | list }}",
    "product": "{{ 'a' * 1000000000 }}",
    "product of lists": "{{ [1] * 1000000000 }}",
    "reversed product": "{{ 1000000000 * 'a' }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "growing number": "{% set ns = namespace(x=10) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling by plus": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by tilde": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by block": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "doubling by list": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "doubling by object": "{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}"
    "{% endfor %}{{ ns.x | tojson }}",
    "doubling by items": "{% set ns = namespace(x={'a': 1}) %}{% for i in range(99) %}"
    "{% set ns.x = {'a': [ns.x.items(), ns.x.items()]} %}{% endfor %}{{ ns.x }}",
    "doubling by call": "{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}"
    "{% endfor %}{{ ns.x }}",
    "replace": "{{ big.replace('', big) }}",
    "replace filter": "{{ big | replace('', big) }}",
    "join": "{{ big.join(big) }}",
    "join filter": "{{ range(10000) | join(big) }}",
    "join with generator": "{{ range(10000) | map('string') | join(big) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent variable width": "{{ '%*d' % (1000000000, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "percent filter": "{{ '%1000000000d' | format(1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format variable width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format many": "{{ ('{0}' * 60000).format(big) }}",
    "indent": "{{ ('a\n' * 9999) | indent(1000000) }}",
    "indent by text": "{{ ('a\n' * 9999) | indent(big) }}",
    "json indent": "{{ [1, 2] | tojson(indent=1000000000) }}",
    "json separators": "{{ [1, 2] | tojson(separators=(big, big)) }}",
    "date": "{{ strftime_now('%1000000000Y') }}",
    "static text": "{% for a in range(10000) %}{% for b in range(10000) %}" + "x" * 30_000 + "{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_soon_in_an_error(name: str) -> None:
    template = ChatTemplate(BOMBS[name])
    meter = Meter(seconds=0.2, characters=1 << 20)
    started = time.monotonic()
    with pytest.raises(LimitExceeded):
        template.render({"big": "x" * 50_000, **VARIABLES}, meter)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'.zfill(1000000000) }}",
        "{{ 'x'.encode() }}",
        "{{ (5).to_bytes(1000000000, 'big') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ dict.update(messages[0], {'role': 'x'}) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ raise_exception('told to the client') }}",
        "{% include 'x' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ missing.attribute.deeper }}",
    ],
)
def test_what_the_sandbox_forbids_is_an_error(source: str) -> None:
    before = str(MESSAGES)
    with pytest.raises((TemplateError, TypeError, RecursionError)):
        ChatTemplate(source).render(VARIABLES)
    assert str(MESSAGES) == before


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ 'x' | center(9) }}",
        "{{ lipsum() " + "}}",
        "{{ 'x' | nothing }}",
        "{{" + "(" * 20_000,
        "x" * (MAX_TEMPLATE_BYTES + 1),
    ],
)
def test_templates_that_cannot_be_used(source: str) -> None:
    with pytest.raises((TemplateError, RecursionError)):
        ChatTemplate(source).render(VARIABLES)


def test_private_attributes_are_undefined_in_formats_too() -> None:
    assert ChatTemplate("{{ '{0.__class__}'.format(1) }}").render({}) == ""


def test_a_namespace_does_not_show_what_it_holds() -> None:
    assert ChatTemplate("{% set ns = namespace(a=1) %}{{ ns }}").render({}) == "<Namespace>"


def test_a_long_chat_is_rendered_in_time() -> None:
    chat = [{"role": "user", "content": f"message {index} " + "word " * 50} for index in range(1000)]
    source = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}{% set ns.seen = ns.seen + [m.role] %}"
        "{% if messages | length > 1 and messages[loop.index0 - 1].role %}{{ m | tojson }}{% endif %}{% endfor %}"
    )
    assert len(ChatTemplate(source).render({"messages": chat})) > 250_000


def test_the_clock_is_asked_all_along() -> None:
    seconds = iter(range(10_000))
    meter = Meter(seconds=100, clock=lambda: next(seconds))
    with pytest.raises(LimitExceeded, match="longer than 100 s"):
        ChatTemplate("{% for a in range(10000) %}{% endfor %}").render({}, meter)
