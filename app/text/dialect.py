"""How models write what they think and the tools they call: one table of the forms of calls, and which one a template
speaks.

The names are mlx-lm's where mlx-lm knows the form, so that `tool_parser_type` of a tokenizer's settings means the same.
Marks are written as regular expressions.
"""

import re
from functools import cache, lru_cache
from typing import Any

import msgspec
import regex

HARMONY = "harmony"
JSON_CALLS = "json_tools"
"""Calls as `{"name": …, "arguments": {…}}` between marks, written while they are streamed; what a grammar enforces."""
BARE_JSON = "bare_json"
"""The same without marks, as an answer of its own; Llama's."""
HARMONY_LAST = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_ENDS = (*HARMONY_LAST, "<|start|>", "<|channel|>")
HARMONY_MARKS = (*HARMONY_ENDS, "<|message|>", "<|constrain|>")
THINKING = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""Marks around reasoning, of models that need both as tokens or in the template to be known by them."""
MAX_SPACE = 256
"""Characters of white space between two marks that belong together."""
_NAME = r"""(?P<name>[^\s"'<>{}()\[\]|]{1,128}?)"""


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to write calls: between the marks `start` and `end`, each behind a head that names it."""

    sign: str
    """Found in the templates of the models that write so."""
    tokens: tuple[str, ...] = ()
    """In the vocabulary of models whose template does not show the sign."""
    start: str = ""
    end: str = ""
    json_head: str = ""
    """Before the arguments of a call as JSON."""
    tail: str = ""
    """Behind them."""
    head: str = ""
    """Before arguments in any other shape."""
    opens: str = ""
    """Begins a parameter: its literal beginning, and `key` with the rest of it."""
    key: str = ""
    closes: str = ""
    """Ends a parameter; KEY is its name."""
    finishes: str = ""
    """Ends a call of parameters."""
    padded: bool = False
    """A parameter stands between two newlines that are none of it."""
    nested: str = ""
    """Before each tag of a parameter whose members and items are parameters again."""
    quote: str = ""
    """Around strings, where the arguments are Gemma's; without parameters and a quote they are Python's."""
    unmarked: str = ""
    """Begins a head that may come without `start`."""
    silent: str = ""
    """Marks that are neither text nor calls."""
    thinking: tuple[str, str] = ("", "")
    """Around its reasoning, where the tokens do not say it."""
    begun: str = ""
    """What every prompt has written of the answer already."""


_GLM = CallForm(
    sign="<arg_key>",
    start=r"<tool_call>",
    end=r"</tool_call>",
    head=rf"{_NAME}\s*(?=<arg_key>|</tool_call>)",
    opens=r"<arg_key>",
    key=r"(?P<key>[^<]*)</arg_key>(?:\\n|\s)*<arg_value>",
    closes=r"</arg_value>",
    finishes=r"</tool_call>",
)
_QWEN = CallForm(
    sign=r"<tool_call>(?:\\n|\n)<function=",
    start=r"<tool_call>",
    end=r"</tool_call>",
    json_head=rf"<function=\s*{_NAME}\s*>\s*(?=\{{)",
    tail=r"</function>",
    head=rf"<function=\s*{_NAME}\s*>",
    opens=r"<parameter=",
    key=r"(?P<key>[^>\n]*)>",
    closes=r"</parameter>",
    finishes=r"</function>",
    padded=True,
    unmarked=r"<function=",
)
_INVOKE = CallForm(
    sign="<minimax:tool_call>",
    start=r"<minimax:tool_call>",
    end=r"</minimax:tool_call>",
    head=rf"<invoke\s+name=[\"']?{_NAME}[\"']?\s*>",
    opens=r"<parameter\s+name=",
    key=r"[\"']?(?P<key>[^>]*?)[\"']?\s*>",
    closes=r"</parameter>",
    finishes=r"</invoke>",
    unmarked=r"<invoke\s+name",
)
_change = msgspec.structs.replace
FORMS: dict[str, CallForm] = {
    "minimax_m3": CallForm(
        sign=r"<mm:think>",
        start=r"\]<\]minimax\[>\[<tool_call>",
        end=r"\]<\]minimax\[>\[</tool_call>",
        head=rf"\]<\]minimax\[>\[<invoke\s+name=\"{_NAME}\"\s*>",
        opens=r"\]<\]minimax\[>\[<(?!/)",
        key=r"(?P<key>[^>]*)>",
        closes=r"\]<\]minimax\[>\[</KEY>",
        finishes=r"\]<\]minimax\[>\[</invoke>",
        nested="]<]minimax[>[",
    ),
    "minimax_m2": _INVOKE,
    "gemma4": CallForm(
        sign=r"<\|tool_call>",
        start=r"<\|tool_call>",
        end=r"<tool_call\|>",
        head=rf"call:\s*{_NAME}\s*(?=\{{)",
        quote='<|"|>',
    ),
    "function_gemma": CallForm(
        sign=r"<start_function_call>",
        start=r"<start_function_call>",
        end=r"<end_function_call>",
        head=rf"call:\s*{_NAME}\s*(?=\{{)",
        quote="<escape>",
    ),
    "longcat": _change(
        _GLM,
        sign=r"<longcat_tool_call>",
        start=r"<longcat_tool_call>",
        end=r"</longcat_tool_call>",
        head=rf"{_NAME}\s*(?=<longcat_arg_key>|</longcat_tool_call>)",
        opens=r"<longcat_arg_key>",
        key=r"(?P<key>[^<]*)</longcat_arg_key>(?:\\n|\s)*<longcat_arg_value>",
        closes=r"</longcat_arg_value>",
        finishes=r"</longcat_tool_call>",
    ),
    "hunyuan": CallForm(
        sign=r"<tool_sep\{\}>|<tool_sep:opensource>",
        start=r"<tool_calls:opensource>",
        end=r"</tool_calls:opensource>",
        head=rf"<tool_call:opensource>\s*{_NAME}\s*<tool_sep:opensource>",
        opens=r"<arg_key:opensource>",
        key=r"(?P<key>[^<]*)</arg_key:opensource>\s*<arg_value:opensource>",
        closes=r"</arg_value:opensource>",
        finishes=r"</tool_call:opensource>",
        unmarked=r"<tool_call:opensource>",
        thinking=("<think:opensource>", "</think:opensource>"),
    ),
    "glm47": _GLM,
    "laguna": _GLM,
    "pythonic": CallForm(
        sign=r"<\|tool_(?:list|call)_start\|>",
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        start=r"<\|tool_call_start\|>",
        end=r"<\|tool_call_end\|>",
        head=rf"(?=\[\s*{_NAME}\s*\()",
    ),
    "seed": _change(_QWEN, sign=r"<seed:tool_call>", start=r"<seed:tool_call>", end=r"</seed:tool_call>", padded=False),
    "qwen3_coder": _QWEN,
    "dsml": CallForm(
        sign=r"｜DSML｜",
        start=r"<｜DSML｜(?:function|tool)_calls>",
        end=r"</｜DSML｜(?:function|tool)_calls>",
        head=rf"<｜DSML｜invoke name=\"{_NAME}\"\s*>",
        opens=r"<｜DSML｜parameter name=",
        key=r"\"(?P<key>[^\"]*)\"(?:\s+string=\"(?P<kind>\w+)\")?\s*>",
        closes=r"</｜DSML｜parameter>",
        finishes=r"</｜DSML｜invoke>",
        unmarked=r"<｜DSML｜invoke",
    ),
    "kimi_k2": CallForm(
        sign=r"<\|tool_calls_section_begin\|>",
        start=r"<\|tool_calls_section_begin\|>",
        end=r"<\|tool_calls_section_end\|>",
        json_head=(
            rf"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?{_NAME}(?::\d+)?)"
            r"\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
        ),
        tail=r"<\|tool_call_end\|>",
        unmarked=r"<\|tool_call_begin\|>",
    ),
    "minicpm5": CallForm(
        sign=r"(?s)<function name=\".*<param name=\"",
        head=rf"<function\s+name\s*=\s*[\"']?{_NAME}[\"']?\s*>",
        opens=r"<param\s+name\s*=",
        key=r"\s*[\"']?(?P<key>[^>]*?)[\"']?\s*>(?:(?P<quoted><!\[CDATA\[)|(?=[^<]|<[^!]|<![^\[]))",
        closes=r"</param>",
        finishes=r"</function>",
        unmarked=r"<function\s+name",
    ),
    "mistral": CallForm(
        sign=r"\[TOOL_CALLS\]",
        start=r"\[TOOL_CALLS\]",
        json_head=rf"{_NAME}\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{{)",
    ),
    "muse_spark": _change(
        _INVOKE,
        sign=r"<atem:function_calls>",
        start=r"<atem:function_calls>",
        end=r"</atem:function_calls>",
        head=rf"<atem:invoke\s+name=\"{_NAME}\"\s*>",
        opens=r"<atem:parameter\s+name=",
        key=r"\"(?P<key>[^\"]*)\"[^>]*>",
        closes=r"</atem:parameter>",
        finishes=r"</atem:invoke>",
        unmarked=r"<atem:invoke",
        silent=(
            r"<\|eom\|>|<\|eot\|>"
            r"|<\|start\|>assistant(?:(?: to=[\w.:/-]+)?<\|message\|>|(?=[^ <]|<[^|]| [^t]))"
        ),
        thinking=("<|start|>assistant to=self<|message|>", "<|eom|>"),
        begun="<|start|>assistant",
    ),
    "kimi_k3": CallForm(
        sign=r"<\|open\|>",
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        start=r"<\|open\|>tools<\|sep\|>",
        end=r"<\|close\|>tools<\|sep\|>",
        json_head=(
            rf"<\|open\|>call tool=\"{_NAME}\"(?:(?!<\|sep\|>).)*<\|sep\|>\s*"
            r"<\|open\|>json(?:(?!<\|sep\|>).)*<\|sep\|>\s*(?=\{)"
        ),
        tail=r"<\|close\|>json<\|sep\|>\s*<\|close\|>call<\|sep\|>",
        head=rf"<\|open\|>call tool=\"{_NAME}\"(?:(?!<\|sep\|>).)*<\|sep\|>",
        opens=r"<\|open\|>argument ",
        key=r"key=\"(?P<key>[^\"]*)\"(?:\s+type=\"(?P<kind>\w+)\")?\s*<\|sep\|>",
        closes=r"<\|close\|>argument<\|sep\|>",
        finishes=r"<\|close\|>call<\|sep\|>",
        silent=r"<\|(?:open|close)\|>response<\|sep\|>|<\|close\|>message<\|sep\|>|<\|end_of_msg\|>",
        thinking=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    "deepseek": CallForm(
        sign=r"<｜tool▁calls▁begin｜>",
        start=r"<｜tool▁calls▁begin｜>",
        end=r"<｜tool▁calls▁end｜>",
        json_head=(
            rf"<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?\s*{_NAME}\s*(?:<｜tool▁sep｜>)?\s*"
            r"(?:```json\s*)?(?=\{)"
        ),
        tail=r"(?:```\s*)?<｜tool▁call▁end｜>",
        unmarked=r"<｜tool▁call▁begin｜>",
    ),
    "solar": CallForm(
        sign=r"<\|tool_call:begin\|>",
        start=r"<\|tool_calls\|>",
        end=r"<\|calls\|>",
        json_head=(
            rf"<\|tool_call:begin\|>\s*(?P<id>[\w-]*)\s*<\|tool_call:name\|>\s*{_NAME}\s*<\|tool_call:args\|>\s*(?=\{{)"
        ),
        tail=r"<\|tool_call:end\|>",
        unmarked=r"<\|tool_call:begin\|>",
        silent=r"<\|begin\|>assistant|<\|content\|>|<\|end\|>",
        thinking=("<|think|>", "<|end|>"),
    ),
    "cohere": CallForm(
        sign=r"<\|START_ACTION\|>",
        start=r"<\|START_ACTION\|>",
        end=r"<\|END_ACTION\|>",
        silent=r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>",
    ),
    "command_r": CallForm(sign=r"(?s)Write .?'Action:", start=r"Action:", end=r"```"),
    "apertus": CallForm(sign=r"<\|tools_prefix\|>", start=r"<\|tools_prefix\|>", end=r"<\|tools_suffix\|>"),
    "tool_calls": CallForm(sign=r"<tool_calls>", start=r"<tool_calls>", end=r"</tool_calls>"),
    "nemotron": CallForm(sign=r"<TOOLCALL>", start=r"<TOOLCALL>", end=r"</TOOLCALL>"),
    "gigachat": CallForm(
        sign=r"'function call'|<\|function_call\|>",
        start=r"<\|function_call\|>|<\|message_sep\|>\s*function call<\|role_sep\|>",
        end=r"<\|message_sep\|>",
    ),
    "granite": CallForm(sign=r"<\|tool_call\|>", start=r"<\|tool_call\|>"),
    "functionary": CallForm(
        sign=r">>>all",
        json_head=rf">>>\s*{_NAME}\s*\n\s*(?=\{{)",
        unmarked=r">>>",
        silent=r">>>all\n",
        begun=">>>",
    ),
    JSON_CALLS: CallForm(sign=r"<tool_call>", start=r"<tool_call>", end=r"</tool_call>"),
    BARE_JSON: CallForm(
        sign=r"\btools\b",
        json_head=rf"<function=\s*{_NAME}\s*>\s*(?=\{{)",
        tail=r"</function>",
        unmarked=r"<function=",
    ),
}
"""In the order in which they are looked for."""


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model. Marks are text; an empty one is none."""

    opening: str = ""
    closing: str = ""
    """Around reasoning."""
    parser: str = ""
    """The form of its calls, by name; empty: the model was not taught to call."""


NO_DIALECT = Dialect()


def with_json_calls(dialect: Dialect) -> Dialect:
    """The same with calls as JSON between marks: what a grammar enforces, and what a model is told that knows none."""
    return msgspec.structs.replace(dialect, parser=JSON_CALLS)


def written_marks(dialect: Dialect) -> tuple[str, str]:
    """The marks before and behind calls as a model writes them; empty where its form has none."""
    form = FORMS.get(dialect.parser)
    usual = [re.split(r"(?<!\\)\|", mark)[0] for mark in (form.start, form.end)] if form else ["", ""]
    start, end = (re.sub(r"\\(.)", r"\1", mark) for mark in usual)
    return start, end


def visible_marks(dialect: Dialect) -> str:
    """Text with every special token in it that the pieces of an answer are told apart by."""
    marks = [dialect.opening, dialect.closing, *(HARMONY_MARKS if dialect.parser == HARMONY else ())]
    if form := FORMS.get(dialect.parser):
        marks += [str(text).replace("\\", "") for text in msgspec.structs.astuple(form)[2:]]
    return "\0".join(marks)


def read_dialect(tokenizer: Any) -> Dialect:
    """The dialect of `tokenizer`, one of transformers with its chat template."""
    found = tokenizer.chat_template
    template = "\n".join(map(str, found.values())) if isinstance(found, dict) else str(found or "")
    if "<|channel|>" in template and "<|message|>" in template:
        return Dialect(opening="<|channel|>analysis", closing="<|channel|>final<|message|>", parser=HARMONY)
    vocabulary = tokenizer.get_vocab()
    kind = str(tokenizer.init_kwargs.get("tool_parser_type") or "")
    parser = kind if kind in FORMS else _form_of(template, vocabulary)
    opening, closing = _thinking(template, vocabulary) or (FORMS[parser].thinking if parser else ("", ""))
    return Dialect(opening=opening, closing=closing, parser=parser)


def _form_of(template: str, vocabulary: dict[str, int]) -> str:
    by_sign = next((name for name, form in FORMS.items() if re.search(form.sign, template)), "")
    if by_sign not in {"", BARE_JSON}:
        return by_sign
    by_tokens = (name for name, form in FORMS.items() if form.tokens and set(form.tokens) <= vocabulary.keys())
    return next(by_tokens, by_sign)


def _thinking(template: str, vocabulary: dict[str, int]) -> tuple[str, str] | None:
    """Marks around reasoning: tokens of their own, or words of the template."""
    for pair in THINKING:
        if set(pair) <= vocabulary.keys():
            return pair
    if {"<|channel>", "<channel|>"} <= vocabulary.keys():
        return "<|channel>thought", "<channel|>"
    return next((pair for pair in THINKING if all(mark in template for mark in pair)), None)


class CallPatterns:
    """The expressions of one form, compiled. Each beginning of a call comes with how its arguments are written:
    `json` behind a head, as `member` of an object, as a whole `value` with the name in it, or else behind a `head`."""

    def __init__(self, form: CallForm) -> None:
        self.form = form
        start = rf"(?:{form.start})\s*"
        optional = rf"(?:{start})?" if form.start else ""
        lead = optional if form.unmarked else start
        heads = [(head, kind) for head, kind in ((form.json_head, "json"), (form.head, "head")) if head]
        values = [(_MEMBER, "member"), (_VALUE, "value")] if form.start else []
        self.first = [(compiled(lead + head), kind) for head, kind in heads]
        """Where text was, in the order in which they are tried."""
        self.first += [(compiled(start + value), kind) for value, kind in values]
        self.again = [(compiled(rf"\s*(?:[,;]\s*)?{optional}{each}"), kind) for each, kind in (*heads, *values)]
        """Behind another call."""
        self.marks = "|".join(f"(?:{mark})" for mark in (form.start, form.unmarked) if mark)
        """What stands where a call may begin."""
        self.unmarked = compiled(form.unmarked or r"(?!)").match
        self.tail = compiled(rf"\s*(?:{form.tail})") if form.tail else None
        self.end = compiled(rf"\s*(?:{form.end})") if form.end else None
        self.opens = compiled(rf"\s*{form.opens}{form.key}")
        self.finishes = compiled(rf"\s*{form.finishes}")
        self.closes_quoted = compiled(rf"\]\]>\s*{form.closes}")

    def closes(self, key: str, *, marked: bool, final: bool) -> "regex.Pattern[str]":
        """Ends the parameter `key`: what its value holds of the same marks does not."""
        form = self.form
        key = regex.escape(key) if "KEY" in form.closes else ""
        if form.finishes == form.end or final:
            behind = form.finishes
        elif marked and form.end:
            behind = rf"{form.finishes}\s*(?:{form.end}|{form.start}|{form.head})"
        else:
            behind = rf"{form.finishes}(?!\s*{form.closes})"
        return compiled(rf"{form.closes.replace('KEY', key)}(?=\s*(?:{form.opens}|{behind}))")


_MEMBER = rf'\{{\s*"name"\s*:\s*"{_NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
_VALUE = r"(?:```\w*\s*)?(?=[\[{])"


@lru_cache(maxsize=512)
def compiled(pattern: str) -> "regex.Pattern[str]":
    """The expression; white space in it is bounded, so that a model that writes nothing else is not waited for."""
    return regex.compile(pattern.replace(r"\s*", rf"\s{{0,{MAX_SPACE}}}"), regex.DOTALL)


@cache
def patterns(name: str) -> CallPatterns:
    """The expressions of the form of this name."""
    return CallPatterns(FORMS[name])
