"""Chat templates are code from a stranger: jinja2's immutable sandbox, without loader, with limits on time and size.

The names that templates expect are those of transformers (`raise_exception`, `strftime_now`, `tojson`, `namespace`,
`{% generation %}`, `{% break %}`). Loops, literals and `~` are rewritten at compile time so that they are metered too.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, cast

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from app.text import limits
from app.text.limits import LimitExceeded, Meter

MAX_TEMPLATE_BYTES = 64 * 1024
REMOVED_FILTERS = ("center", "filesizeformat", "pprint", "random", "urlencode", "urlize", "wordwrap", "xmlattr")
REMOVED_METHODS = frozenset(
    {"center", "encode", "expandtabs", "ljust", "maketrans", "rjust", "to_bytes", "translate", "zfill"}
)
BINARY_OPERATORS: Mapping[str, Callable[[Meter, Any, Any], Any]] = {
    "+": lambda _meter, left, right: left + right,
    "*": limits.multiply,
    "**": limits.power,
    "%": limits.modulo,
}


class ChatTemplate:
    """One compiled template. `render` may be called from any thread, one at a time."""

    def __init__(self, source: str) -> None:
        """Compile; raises jinja2's `TemplateError`, `RecursionError` or `ValueError` when that is impossible."""
        if len(source.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            raise LimitExceeded(f"it is larger than {MAX_TEMPLATE_BYTES} bytes")
        self._environment = _LimitedEnvironment()
        self._template = self._environment.from_string(source)
        self._lock = threading.Lock()

    def render(self, variables: Mapping[str, Any], meter: Meter | None = None) -> str:
        """The text; raises whatever the template raises, `LimitExceeded` when it costs too much."""
        with self._lock:
            self._environment.meter = meter = meter or Meter()
            try:
                return "".join(self._chunks(variables, meter))
            finally:
                self._environment.meter = Meter()

    def _chunks(self, variables: Mapping[str, Any], meter: Meter) -> Iterator[str]:
        size = 0
        for chunk in self._template.generate(**variables):
            size += len(chunk)
            meter.allow(size)
            meter.tick()
            yield chunk


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(BINARY_OPERATORS)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_written,
            extensions=[_GenerationBlock, LoopControlExtension],
        )
        self.meter = Meter()
        self.globals = {
            "range": limits.limited_range,
            "dict": _make_dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
        }
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters |= {"tojson": self._to_json, "join": self._join, "replace": self._replace, "indent": self._indent}
        self.filters["format"] = self._format
        self.filters = {name: self._metered(function) for name, function in self.filters.items()}

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template: the clock, the size of what goes in and of what comes out."""
        self.enter(args, kwargs)
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name in {"join", "replace"}:
            return getattr(limits, name)(self.meter, owner, *args, **kwargs)
        pattern = getattr(getattr(obj, "__wrapped__", None), "__self__", None)
        if isinstance(pattern, str):  # str.format, which jinja2 has wrapped
            limits.allow_format(self.meter, pattern, "{", (*args, *kwargs.values()))
        result = super().call(context, obj, *args, **kwargs)
        self.meter.weigh(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ARG002
        """`+`, `*`, `**` and `%`, weighed before or after."""
        self.meter.tick()
        result = BINARY_OPERATORS[operator](self.meter, left, right)
        self.meter.weigh(result)
        return result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in jinja2, without the methods that pad or translate."""
        return attr not in REMOVED_METHODS and super().is_safe_attribute(obj, attr, value)

    def enter(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.meter.tick()
        for value in (*args, *kwargs.values()):
            self.meter.weigh(value)

    def turn(self, characters: int) -> None:
        """One turn of a loop that writes this much fixed text."""
        self.meter.tick()
        self.meter.write(characters)

    def concatenate(self, *parts: Any) -> str:
        """The operator `~`."""
        return limits.join(self.meter, "", parts)

    def literal(self, value: Any) -> Any:
        """A list, tuple or object written in the template; it is weighed as the argument of this call."""
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return cast("nodes.Template", _Metering().visit(super()._parse(source, name, filename)))

    def _metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.enter(args, kwargs)
            result = function(*args, **kwargs)
            self.meter.weigh(result)
            return result

        return run

    def _join(self, value: Any, d: str = "", attribute: str | None = None) -> str:
        parts = value if attribute is None else [self.getattr(part, attribute) for part in value]
        return limits.join(self.meter, d, parts)

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        return limits.replace(self.meter, str(value), old, new, count)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        limits.allow_format(self.meter, str(value), "%", (*args, *kwargs.values()))
        return str(value) % (kwargs or args)

    def _indent(self, value: Any, width: int | str = 4, *rest: bool, **named: bool) -> str:
        """jinja2's filter of that name, when its result is not too large."""
        text = str(value)
        self.meter.allow(len(text) + (1 + len(text.splitlines())) * (width if isinstance(width, int) else len(width)))
        return do_indent(text, width, *rest, **named)

    def _to_json(self, value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:  # noqa: FBT001, FBT002 - transformers' signature
        """JSON without HTML escapes; `options` are `separators` and `sort_keys`."""
        self.meter.allow(self.meter.weigh(value) * (1 + 8 * (indent or 0)))
        if any(len(separator) > 16 for separator in options.get("separators") or ()):
            raise LimitExceeded("it separates JSON by more than 16 characters")
        known = {name: options[name] for name in ("separators", "sort_keys") if name in options}
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **known)


class _Metering(NodeTransformer):
    """Rewrites what jinja2 compiles to plain Python (loops, `~`, literals) into calls of the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's name
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("turn", [nodes.Const(text)]), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("concatenate", node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("literal", [node])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("literal", [node]) if node.ctx == "load" else node

    visit_Dict = visit_List  # noqa: N815


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """jinja2's namespace without private names, which could reach into the interpreter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in dict(*args, **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise TemplateError(f"a namespace cannot hold {name!r}")


def _call(method: str, arguments: list[Any]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


@pass_context
def _written(context: Context, value: Any) -> str:
    """Every `{{ … }}`: weigh the value before it becomes text."""
    meter = cast("_LimitedEnvironment", context.environment).meter
    meter.tick()
    meter.weigh(value)
    text = str(value)
    meter.write(len(text))
    return text


def _make_dict(*pairs: Any, **values: Any) -> dict[Any, Any]:
    return dict(*pairs, **values)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 256 or limits.WIDE_PERCENT.search(pattern):
        raise LimitExceeded("it formats the date with a wide field")
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - the user's own date


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))
