"""Hostile contents of model folders: templates and tokenizers that never end or fill memory."""

import json
import os
from pathlib import Path

from tests.tiny import write_tiny_tokenizer

LOOPS = "{% set r = range(100000) %}"
GROWING = "{% set ns = namespace(x='a' * 1000) %}{% for i in range(99) %}"
TEMPLATES = {
    "endless loops": LOOPS + "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
    "filtered loops": LOOPS + "{% for a in r %}{% for b in r %}{% for c in r if false %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "loops over text": "{% set t = 'x' * 100000 %}{% for a in t %}{% for b in t %}{% endfor %}{% endfor %}",
    "a loop that writes": LOOPS + "{% for a in r %}{% for b in r %}" + "x" * 3000 + "{% endfor %}{% endfor %}",
    "a loop that recurses": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{{ loop([1, 1]) }}{% endfor %}",
    "a long range": "{{ range(10 ** 12) | list | length }}",
    "the sum of a range": "{{ range(10 ** 12) | sum }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "macros that call one another": "{% macro a(n) %}{% if n %}{{ b(n - 1) }}{{ b(n - 1) }}{% endif %}{% endmacro %}"
    "{% macro b(n) %}{{ a(n) }}{{ a(n) }}{% endmacro %}{{ a(40) }}",
    "a caller that calls": "{% macro box(n) %}{{ caller(n) }}{{ caller(n) }}{% endmacro %}"
    "{% macro f(n) %}{% if n %}{% call(m) box(n) %}{{ f(m - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ f(50) }}",
    "batch": "{{ [1] | batch(3000000000, 'x') | list | length }}",
    "slice": "{{ [1] | slice(3000000000, 'x') | list | length }}",
    "slices that are summed": "{{ [1] | slice(3000000000) | map('length') | sum }}",
    "a generator": "{{ (range(10 ** 12) | map('string') | select | map('upper')) | list }}",
    "a generator that is joined": "{{ range(10 ** 12) | map('string') | join }}",
    "a generator that is sorted": "{{ range(10 ** 12) | map('string') | sort }}",
    "groups": "{{ range(10 ** 12) | groupby('real') | list }}",
    "a cycler": "{% set c = cycler(1, 2) %}{% for a in range(10 ** 12) %}{{ c.next() }}{% endfor %}",
    "text times": "{{ 'a' * 10 ** 11 }}",
    "times text": "{{ (10 ** 11 * 'a') | length }}",
    "a list times": "{{ ([1] * 10 ** 11) | length }}",
    "a power": "{{ 10 ** (10 ** 8) }}",
    "a power that is written": "{{ (7 ** (10 ** 6)) | string | length * 10 ** 12 | string | length }}{{ 9 ** 9 ** 9 }}",
    "a number that grows": "{% set ns = namespace(x=10) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "doubling by plus": GROWING + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by tilde": GROWING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by block": GROWING + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "doubling by list": GROWING + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "doubling by object": GROWING + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "replace": "{% set t = 'x' * 100000 %}{{ t.replace('', t) }}",
    "the filter replace": "{% set t = 'x' * 100000 %}{{ t | replace('', t) }}",
    "join": "{% set t = 'x' * 100000 %}{{ t.join(t) }}",
    "the filter join": "{{ range(100000) | join('x' * 100000) }}",
    "center": "{{ 'x' | center(10 ** 11) }}",
    "padding": "{{ 'x'.ljust(10 ** 11) }}",
    "indent": "{{ ('a\n' * 100000) | indent(1000000) }}",
    "indented JSON": "{{ range(1000) | list | tojson(indent=100000000) }}",
    "word wrap": "{{ ('a ' * 3000000) | wordwrap(1, true, 'x' * 10000) }}",
    "links in text": "{{ ('http://' + 'a.' * 100000 + '(' * 100000) | urlize }}",
    "a wide format": "{{ '%099999999999d' % 1 }}{{ '%9999999999s' % 'x' }}",
    "a format of a format": "{{ '{0:>{1}}'.format('x', 10 ** 11) }}",
}
TOKENIZERS = ("exploding normalizers", "a named pipe", "two million entries", "a link to a device", "no JSON")


def write_hostile_template(folder: Path, name: str) -> Path:
    """Write a folder whose template explodes on the message "bomb"; some do so on any, when jinja2 compiles them."""
    write_folder(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    bomb = "{% if messages[0].content == 'bomb' %}" + TEMPLATES[name] + "{% else %}"
    settings["chat_template"] = bomb + settings["chat_template"] + "{% endif %}"
    file.write_text(json.dumps(settings))
    return folder


def write_hostile_tokenizer(folder: Path, kind: str) -> Path:
    """Write a folder with one of the `TOKENIZERS`."""
    write_folder(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    file.unlink()
    match kind:
        case "exploding normalizers":
            ten = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
            content["normalizer"] = {"type": "Sequence", "normalizers": [ten] * 8}
        case "two million entries":
            content["model"]["vocab"] |= {f"entry {number}": 1000 + number for number in range(2_000_000)}
    if kind == "a named pipe":
        os.mkfifo(file)
    elif kind == "a link to a device":
        file.symlink_to("/dev/zero")
    else:
        file.write_text("{" if kind == "no JSON" else json.dumps(content))
    return folder


def write_folder(folder: Path) -> Path:
    """Write a folder with a config and a byte tokenizer, without weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 4096}))
    write_tiny_tokenizer(folder)
    return folder
