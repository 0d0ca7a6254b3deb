from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from app.text.prompt.template import ChatTemplate

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


@pytest.mark.parametrize(
    "source",
    [
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


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'x' | nothing }}", "{{" + "(" * 20_000])
def test_templates_that_cannot_be_used(source: str) -> None:
    with pytest.raises((TemplateError, RecursionError)):
        ChatTemplate(source)


def test_private_attributes_are_undefined_in_formats_too() -> None:
    assert ChatTemplate("{{ '{0.__class__}'.format(1) }}").render({}) == ""
