"""Compiled expressions of each form of tool calls."""

from functools import cache

import regex

from app.text.dialect import FORMS, OBJECT_HEAD, VALUE_HEAD, CallForm, compiled


class CallPatterns:
    """Compiled expressions of one form. Each start of a call is paired with the kind of its arguments: `json` (after a
    head), `member` (of an object), `value` (a whole one, with the name) or `head` (any other shape after a head)."""

    def __init__(self, form: CallForm) -> None:
        self.form = form
        self.parameters = ParameterPatterns(form)
        start, optional = _start(form), _optional_start(form)
        prefix = optional if form.bare_head else start
        literal = form.head if not form.opens else ""
        heads = [(head, kind) for head, kind in ((form.json_head, "json"), (form.head, "head")) if head]
        values = [(OBJECT_HEAD, "member"), (VALUE_HEAD, "value")] if form.start else []
        self.call_starts = [(compiled(prefix + head), kind) for head, kind in heads]
        """Patterns of a call's start after text, in the order in which they are tried."""
        self.call_starts += [(compiled(start + value), kind) for value, kind in values]
        self.following_starts = [
            (compiled(rf"\s*(?:[,;]\s*)?{start if pattern == literal else optional}{pattern}"), kind)
            for pattern, kind in (*heads, *values)
        ]
        """Patterns of a call's start after another call. Literals end with the end marker, so they need another."""
        self.start_markers = "|".join(f"(?:{marker})" for marker in (form.start, form.bare_head) if marker)
        """Pattern of the markers at which a call may start."""
        self.matches_bare_head = compiled(form.bare_head or r"(?!)").match
        self.tail = compiled(rf"\s*(?:{form.tail})") if form.tail else None
        self.end = compiled(rf"\s*{_surplus(form)}(?:{form.end})") if form.end else None
        self.literal_end = compiled(rf"{form.end}|(?={form.start})") if literal else None
        """Pattern of the end of a call whose arguments are literals."""
        self.end_after_json = compiled(rf"\s*(?:[}}\]]\s*){{0,3}}(?:{form.end})") if form.end else None
        """Pattern of the end marker, after any surplus closing brackets that the model wrote."""
        self.stray_end = compiled(rf"\s*,?\s*(?:{form.end or '(?!)'})")
        self.start = compiled(rf"\s*(?:{form.start or '(?!)'})\s*")


class ParameterPatterns:
    """Compiled expressions of the parameters of one form, each of them a text between markers."""

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._another = rf"(?:{_start(form) if form.finishes == form.end else _optional_start(form)}{form.head})"
        """Pattern of another call's beginning. Where calls have no end marker of their own, a head is a mere word."""
        self.opens = compiled(rf"\s*{form.opens}{form.key}")
        left_out = rf"|(?={form.end})" if form.finishes != form.end and form.end else ""
        self.finishes = compiled(rf"\s*(?:{form.finishes}{left_out})")
        """Pattern of the marker after the last parameter, which a model may leave out before the end marker."""
        self.before_another = compiled(rf"\s*(?={self._another})")
        self.inner_opens = compiled(form.opens + form.key), compiled(rf"(?<=\n){form.opens}{form.key}(?=\n)")
        """Patterns of a parameter's beginning inside of a value: anywhere, and on a line of its own."""
        end = rf"(?:(?:{form.finishes})\s*(?:{form.end})?|{form.end or '(?!)'})"
        unclosed = rf"(?={end}\s*(?:{self._another}|{form.start or '(?!)'}|\Z))"
        self.unclosed_ends = compiled(unclosed), compiled(rf"(?<=\n){unclosed}")
        """Patterns of the place where a call ends, followed by another call or the end of the answer: anywhere, and at
        the beginning of a line."""
        self.edges = compiled(rf"{self._another}|{form.finishes}")
        """Pattern of the beginning and the end of a call."""
        self.any_closes = compiled(form.closes.replace("KEY", "[^>]*"))
        """Pattern of the closing marker of any parameter."""
        self.closes_quoted = compiled(rf"\]\]>\s*{form.closes}")

    def closes(
        self, key: str, *, has_start_marker: bool, final: bool = False, ended: bool = False
    ) -> "regex.Pattern[str]":
        """Return the pattern that ends the parameter `key` but does not match the same markers inside its value.

        `final`: the text is complete; `ended`: the model ended it, so it may have left out the markers that follow.
        """
        form = self._form
        key = regex.escape(key) if "KEY" in form.closes else ""
        if form.finishes == form.end or final:
            finish_pattern = rf"{form.finishes}|(?:{form.end or '(?!)'})\s*\Z"
        elif has_start_marker and form.end:
            finish_pattern = (
                rf"{form.finishes}\s*{_surplus(form)}(?:{form.end}|{form.start}|{form.head})"
                rf"|(?:{form.end})\s*(?:{form.start})"
            )
        else:
            finish_pattern = rf"{form.finishes}(?!\s*{form.closes})"
        following = rf"{form.opens}|{finish_pattern}|{self._another}" + (r"|\Z" if ended else "")
        return compiled(rf"{form.closes.replace('KEY', key)}(?=\s*(?:{following}))")


@cache
def patterns(name: str) -> CallPatterns:
    """Return the compiled expressions of the form `name`."""
    return CallPatterns(FORMS[name])


def _start(form: CallForm) -> str:
    return rf"(?:{form.start})\s*"


def _optional_start(form: CallForm) -> str:
    return rf"(?:{_start(form)})?" if form.start else ""


def _surplus(form: CallForm) -> str:
    """Return a pattern of markers after the last parameter that the model wrote once more."""
    return rf"(?:{form.finishes}\s*|</function_\w+>\s*)*" if form.finishes not in {"", form.end} else ""
