"""Dialects of reasoning and tool calls: a table of call forms, and the detection of the form that a template uses.

Forms that mlx-lm supports have mlx-lm's names, so `tool_parser_type` in a tokenizer's config means the same here.
Markers are regular expressions.
"""

import re
from functools import lru_cache
from typing import Any

import msgspec
import regex

HARMONY = "harmony"
JSON_CALLS = "json_tools"
"""Form `{"name": …, "arguments": {…}}` between markers: its arguments are streamed, and grammars enforce it."""
BARE_JSON = "bare_json"
"""Same form without markers, as the whole answer (Llama)."""
HARMONY_LAST = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_ENDS = (*HARMONY_LAST, "<|start|>", "<|channel|>")
HARMONY_MARKERS = (*HARMONY_ENDS, "<|message|>", "<|constrain|>")
REASONING_MARKERS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
"""Marker pairs around reasoning. A model uses a pair if both are tokens, or if both are in its template."""
WRAPPERS = ("answer", "response")
"""Tags around the answer that follows the reasoning (Hunyuan; ERNIE 4.5, Granite 3.3), if the template has them."""
MAX_WHITESPACE = 256
"""Limit on white space, in characters, between two markers that belong together."""
_NAME = r"""(?P<name>[^\s"'<>{}()\[\]|]{1,300}?)"""
_PYTHON_CALL = rf"(?=\[?\s*{_NAME}\s*\()"
"""Start of calls that are written in Python, with or without the brackets of a list."""
OBJECT_HEAD = rf'\{{{{1,2}}\s*"name(?:"\s*:|=)\s*"{_NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{\s*[^\s}}])'
"""Start of a JSON object that names its tool before its arguments."""
VALUE_HEAD = r"(?:```\w*\s*)?(?=[\[{])"
"""Start of a JSON object, or a list of them, fenced or not."""


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """Syntax of tool calls. Calls are between the markers `start` and `end`, each after a head that names the tool."""

    sign: str
    """Pattern that identifies the templates of models that use this form."""
    tokens: tuple[str, ...] = ()
    """Vocabulary tokens that identify models whose template lacks the sign."""
    start: str = ""
    end: str = ""
    json_head: str = ""
    """Head of a call with JSON arguments."""
    tail: str = ""
    """Marker after JSON arguments."""
    head: str = ""
    """Head of a call with arguments in any other shape."""
    naming: str = "TOOL"
    """Pattern of what names a tool in a head; TOOL stands for its name, KEY for that of one of its parameters."""
    opens: str = ""
    """Start of a parameter's opening marker; `key` matches the rest of the marker."""
    key: str = ""
    closes: str = ""
    """Closing marker of a parameter; KEY stands for its name."""
    finishes: str = ""
    """Marker after the last parameter of a call."""
    padded: bool = False
    """Whether a parameter's text is padded with a newline on either side."""
    nested: str = ""
    """Prefix of each tag in parameters whose members and items are parameters again."""
    quote: str = ""
    """Quote around strings in Gemma's arguments. Forms with neither parameters nor a quote have Python arguments."""
    bare_head: str = ""
    """Start of a head that may appear without the `start` marker."""
    silent: str = ""
    """Markers that are neither text nor calls and are dropped."""
    thinking: tuple[str, str] = ("", "")
    """Markers around reasoning of models without a pair of `REASONING_MARKERS`."""
    begun: str = ""
    """Start of the answer that every prompt already contains."""


_DSML = "｜?｜DSML｜｜?"
"""Mark of DeepSeek, whose bars a model may double."""
_GLM_BREAKS = r"(?:\\n\s*){0,8}+"
"""Line breaks that GLM wrote in two letters; a few, so that no reader waits while it writes nothing else."""
_GLM = CallForm(
    sign="<arg_key>",
    start=r"<tool_call>",
    end=rf"</tool_call>|{_GLM_BREAKS}</tool_call>",
    json_head=rf"{_NAME}\s*{_GLM_BREAKS}(?=\{{)",
    head=(
        rf"{_NAME}\s*{_GLM_BREAKS}(?:</arg_value>\s*)?"
        r"(?=<arg_key>|</tool_call>|</arg_key>|(?:<tool_call>|\s)[^<\s]*</arg_key>)"
    ),
    naming="TOOLKEY",
    opens=rf"{_GLM_BREAKS}(?:<arg_key>|(?:<tool_call>)?(?=[^<]{{1,99}}</arg_key>))",
    key=rf"(?P<key>[^<]*)</arg_key>\s*{_GLM_BREAKS}(?:<arg_value>|(?=[^<\s\\]))",
    closes=r"</arg_value>",
    finishes=rf"</tool_call>|{_GLM_BREAKS}</tool_call>",
)
_QWEN = CallForm(
    sign=r"<tool_call>(?:\\n|\n)<function=",
    start=r"<tool_call>",
    end=r"</tool_call>",
    json_head=rf"<function=\s*[\"']?{_NAME}[\"']?\s*>\s*(?=\{{)",
    tail=r"</function>",
    head=rf"<(?:function|(?<=<tool_call>\s*<)parameter)=\s*[\"']?{_NAME}[\"']?\s*>",
    opens=r"<parameter=",
    key=r"\s*[\"']?(?P<key>[^>\n]*?)[\"']?[ \t]*(?:>|(?=\n))",
    closes=r"</parameter>",
    finishes=r"</function>",
    padded=True,
    bare_head=r"<function=",
)
_INVOKE = CallForm(
    sign="<minimax:tool_call>",
    start=r"<minimax:tool_call>|<function_calls>",
    end=r"</minimax:tool_call>|</function_calls>",
    head=rf"<invoke\s+name=[\"']?{_NAME}[\"']?\s*>",
    opens=r"<parameter\s+name=",
    key=r"[\"']?(?P<key>[^>]*?)[\"']?\s*>",
    closes=r"</parameter>",
    finishes=r"</invoke>",
    bare_head=r"<invoke\s+name",
)
_variant = msgspec.structs.replace
FORMS: dict[str, CallForm] = {
    "minimax_m3": CallForm(
        sign=r"<mm:think>",
        start=r"\]<\]minimax\[>\[<tool_call>",
        end=r"\]<\]minimax\[>\[</tool_call>",
        head=rf"\]<\]minimax\[>\[<invoke\s+name=\"{_NAME}\"\s*>",
        opens=r"\]<\]minimax\[>\[<(?!/|invoke\s)",
        key=r"(?P<key>[^>]*)>",
        closes=r"\]<\]minimax\[>\[</KEY>",
        finishes=r"\]<\]minimax\[>\[</invoke>",
        nested="]<]minimax[>[",
    ),
    "minimax_m2": _INVOKE,
    "gemma4": CallForm(
        sign=r"<\|tool_call>",
        start=r"<\|tool_call>|<tool_call(?=:)",
        end=r"<tool_call\|>",
        head=rf"(?:call)?:\s*{_NAME}\s*(?=[{{(])",
        quote='<|"|>',
    ),
    "function_gemma": CallForm(
        sign=r"<start_function_call>",
        start=r"<start_function_call>",
        end=r"<end_function_call>",
        head=rf"call:\s*{_NAME}\s*(?=[{{(])",
        quote="<escape>",
    ),
    "longcat": _variant(
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
        bare_head=r"<tool_call:opensource>",
        thinking=("<think:opensource>", "</think:opensource>"),
    ),
    "glm47": _GLM,
    "laguna": _GLM,
    "pythonic": CallForm(
        sign=r"<\|tool_(?:list|call)_start\|>",
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        start=r"<\|tool_call_start\|>",
        end=r"<\|tool_call_end\|>",
        head=_PYTHON_CALL,
    ),
    "olmo3": CallForm(
        sign=r"<function_calls>",
        start=r"<function_calls>",
        end=r"</function_calls>",
        head=_PYTHON_CALL,
    ),
    "seed": _variant(
        _QWEN, sign=r"<seed:tool_call>", start=r"<seed:tool_call>", end=r"</seed:tool_call>", padded=False
    ),
    "qwen3_coder": _QWEN,
    "dsml": CallForm(
        sign=r"｜DSML｜",
        start=rf"<｜DSML｜tool_calls>|<{_DSML}(?:function|tool)_?calls>",
        end=rf"</｜DSML｜tool_calls>|</{_DSML}(?:function|tool)_?calls>",
        head=rf"<{_DSML}invoke name=\"{_NAME}\"\s*>",
        opens=rf"<(?:{_DSML})?parameter name=",
        key=r"\"(?P<key>[^\"]*)\"(?:\s+string=\"(?P<kind>\w+)\")?\s*>",
        closes=rf"</{_DSML}parameter>",
        finishes=rf"</{_DSML}invoke>",
        bare_head=rf"<{_DSML}invoke",
    ),
    "kimi_k2": CallForm(
        sign=r"<\|tool_calls_section_begin\|>",
        start=r"<\|tool_calls_section_begin\|>|<\|tool_call_section_begin\|>",
        end=r"<\|tool_calls_section_end\|>|<\|tool_call_section_end\|>",
        json_head=rf"<\|tool_call_begin\|>\s*(?P<id>{_NAME})\s*<\|tool_call_argument_begin\|>\s*(?=\{{)",
        naming=r"(?:functions[._]?)?TOOL(?:[:._]?\d+)?",
        tail=r"<\|tool_call_end\|>",
        bare_head=r"<\|tool_call_begin\|>",
    ),
    "minicpm5": CallForm(
        sign=r"(?s)<function name=\".*<param name=\"",
        head=rf"<function\s+name\s*=\s*[\"']?{_NAME}[\"']?\s*>",
        opens=r"<param\s+name\s*=",
        key=r"\s*[\"']?(?P<key>[^>]*?)[\"']?\s*>(?:(?P<quoted><!\[CDATA\[)|(?=[^<]|<[^!]|<![^\[]))",
        closes=r"</param>",
        finishes=r"</function>",
        bare_head=r"<function\s+name",
    ),
    "mistral": CallForm(
        sign=r"\[TOOL_CALLS\]",
        start=r"\[TOOL_CALLS\]",
        json_head=rf"{_NAME}\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{{)",
    ),
    "muse_spark": _variant(
        _INVOKE,
        sign=r"<atem:function_calls>",
        start=r"<atem:function_calls>",
        end=r"</atem:function_calls>",
        head=rf"<atem:invoke\s+name=\"{_NAME}\"\s*>",
        opens=r"<atem:parameter\s+name=",
        key=r"\"(?P<key>[^\"]*)\"[^>]*>",
        closes=r"</atem:parameter>",
        finishes=r"</atem:invoke>",
        bare_head=r"<atem:invoke",
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
            rf"(?:<｜tool▁call▁begin｜>\s*|(?=[^\s<]+<｜tool▁sep｜>))(?:function<｜tool▁sep｜>)?"
            rf"\s*{_NAME}\s*(?:<｜tool▁sep｜>)?\s*"
            r"(?:```json\s*)?(?=\{)"
        ),
        tail=r"(?:```\s*)?<｜tool▁call▁end｜>",
        bare_head=r"<｜tool▁call▁begin｜>",
    ),
    "solar": CallForm(
        sign=r"<\|tool_call:begin\|>",
        start=r"<\|tool_calls\|>",
        end=r"<\|calls\|>",
        json_head=(
            rf"<\|tool_call:begin\|>\s*(?P<id>[\w-]*)\s*<\|tool_call:name\|>\s*{_NAME}\s*<\|tool_call:args\|>\s*(?=\{{)"
        ),
        tail=r"<\|tool_call:end\|>",
        bare_head=r"<\|tool_call:begin\|>",
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
    "tool_calls": CallForm(
        sign=r"<tool_calls>", start=r"<tool_calls>", end=r"</tool_calls>", silent=r"\s*\[END FINAL RESPONSE\]"
    ),
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
        bare_head=r">>>",
        silent=r">>>all\n",
        begun=">>>",
    ),
    JSON_CALLS: CallForm(sign=r"<tool_call>", start=r"<tool_call>", end=r"</tool_call>"),
    BARE_JSON: CallForm(
        sign=r"\btools\b",
        json_head=rf"<function=\s*{_NAME}\s*>\s*(?=\{{)",
        tail=r"</function>",
        bare_head=r"<function=",
    ),
}
"""Forms by name, in the order in which their signs are searched for."""


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """Dialect of one model. Markers are plain text; an empty one means none."""

    opening: str = ""
    closing: str = ""
    """Markers around reasoning."""
    parser: str = ""
    """Name of the call form; empty if the model was not trained to call tools."""
    wrapper: str = ""
    """Tag around the answer after reasoning."""


NO_DIALECT = Dialect()


def with_json_calls(dialect: Dialect) -> Dialect:
    """Return the dialect with `JSON_CALLS`, which grammars enforce and models without a form are prompted to use."""
    return msgspec.structs.replace(dialect, parser=JSON_CALLS)


def literal_markers(dialect: Dialect) -> tuple[str, str]:
    """Return the markers before and after calls as a model writes them; empty where its form has none."""
    form = FORMS.get(dialect.parser)
    first_alternatives = [re.split(r"(?<!\\)\|", marker)[0] for marker in (form.start, form.end)] if form else ["", ""]
    start, end = (re.sub(r"\\(.)", r"\1", marker) for marker in first_alternatives)
    return start, end


def visible_markers(dialect: Dialect) -> str:
    """Return a text that contains every special token that separates the parts of an answer."""
    markers = [dialect.opening, dialect.closing, *(HARMONY_MARKERS if dialect.parser == HARMONY else ())]
    if form := FORMS.get(dialect.parser):
        markers += [str(text).replace("\\", "") for text in msgspec.structs.astuple(form)[2:]]
    return "\0".join(markers)


def read_dialect(tokenizer: Any) -> Dialect:
    """Detect the dialect of `tokenizer` (from transformers) by its chat template and vocabulary."""
    chat_template = tokenizer.chat_template
    template = (
        "\n".join(map(str, chat_template.values())) if isinstance(chat_template, dict) else str(chat_template or "")
    )
    if "<|channel|>" in template and "<|message|>" in template:
        return Dialect(opening="<|channel|>analysis", closing="<|channel|>final<|message|>", parser=HARMONY)
    vocabulary = tokenizer.get_vocab()
    kind = str(tokenizer.init_kwargs.get("tool_parser_type") or "")
    parser = kind if kind in FORMS else _find_form(template, vocabulary)
    opening, closing = _find_reasoning_markers(template, vocabulary) or (FORMS[parser].thinking if parser else ("", ""))
    wrapper = next((tag for tag in WRAPPERS if f"</{tag}>" in template), "")
    return Dialect(opening=opening, closing=closing, parser=parser, wrapper=wrapper)


def _find_form(template: str, vocabulary: dict[str, int]) -> str:
    by_sign = next((name for name, form in FORMS.items() if re.search(form.sign, template)), "")
    if by_sign not in {"", BARE_JSON}:
        return by_sign
    by_tokens = (name for name, form in FORMS.items() if form.tokens and set(form.tokens) <= vocabulary.keys())
    return next(by_tokens, by_sign)


def _find_reasoning_markers(template: str, vocabulary: dict[str, int]) -> tuple[str, str] | None:
    """Find the markers around reasoning, among the tokens or else in the template."""
    for pair in REASONING_MARKERS:
        if set(pair) <= vocabulary.keys():
            return pair
    if {"<|channel>", "<channel|>"} <= vocabulary.keys():
        return "<|channel>thought", "<channel|>"
    # Some templates only open the reasoning, at the end of the prompt; others only remove it from earlier answers.
    named = [([marker in template for marker in pair], pair) for pair in REASONING_MARKERS]
    has_markers, pair = max(named, key=lambda entry: entry[0])
    return pair if any(has_markers) else None


@lru_cache(maxsize=512)
def compiled(pattern: str) -> "regex.Pattern[str]":
    """Compile a pattern with a limit on white space, so that no reader waits while a model writes nothing else."""
    return regex.compile(pattern.replace(r"\s*", rf"\s{{0,{MAX_WHITESPACE}}}"), regex.DOTALL)
