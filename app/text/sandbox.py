"""Chat templates are code from a stranger: jinja2's immutable sandbox with the names that transformers adds, no more.

Nothing here bounds what a template costs. That is the business of `app.worker.texts`, which runs it in a process of its
own and ends that process.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str) -> None:
        """Compile; raises jinja2's `TemplateError`, `RecursionError` or `ValueError` when that is impossible."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, LoopControlExtension],
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "dict": _make_dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._template = environment.from_string(source)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text; raises whatever the template raises."""
        return self._template.render(**variables)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """jinja2's namespace without private names, which could reach into the interpreter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in dict(*args, **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _make_dict(*pairs: Any, **values: Any) -> dict[Any, Any]:
    return dict(*pairs, **values)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - transformers' signature
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """JSON without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - the user's own date


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))
