"""The text side of one model: chat template, tokenizer, stop tokens. Used by the text thread of the worker only.

Nothing of the model folder is executed: the tokenizer is built from data files without network or remote code, and
the template runs in `app.text.sandbox`. What a client can get wrong is `InvalidRequest`; what is wrong with the folder
is `ModelUnavailable`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from mlx_lm import tokenizer_utils

from app.core.errors import InvalidRequest, ModelUnavailable
from app.core.model_folder import text_number
from app.core.safe_files import printable, read_object
from app.text.messages import checked_arguments, plain_messages
from app.text.pieces import ByteDetokenizer, Detokenizer, TokenBytes, WindowDetokenizer, token_bytes_of
from app.text.sandbox import ChatTemplate

PROBE = "Grüße, 你好 👩‍💻 a ,b  isn't\n\tx"
"""The fast detokenizer has to agree with the tokenizer's own on this text, or it is not used."""
NO_TEMPLATE = "this model has no chat template: use /v1/completions"

Renderer = Callable[[dict[str, Any]], str]


class TextModel:
    """Tokenizer and chat template of one model folder."""

    def __init__(self, tokenizer: Any, *, stop_token_ids: frozenset[int], vocabulary_size: int) -> None:
        """`tokenizer` is mlx-lm's wrapper; `load` is the usual way to get one."""
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.vocabulary_size = vocabulary_size
        """How many ids the model has logits for, padding included."""
        self.hidden_token_ids = _hidden(tokenizer) | stop_token_ids
        """Tokens that are no text: special ones, except those that mark tool calls and reasoning, and the stops."""
        self._names = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
        self._renderers = _renderers(tokenizer)
        self._start = tuple(tokenizer.encode("")[:1])
        if self._start != (tokenizer.bos_token_id,):
            self._start = ()
        found = token_bytes_of(tokenizer)
        self._bytes: TokenBytes | None = found[0] if found else None
        self._trims = found is not None and found[1]
        if not self._agrees():
            self._bytes = None

    @classmethod
    def load(cls, path: Path) -> "TextModel":
        """Read a folder that `inspect_folder` accepted. Raises `ModelUnavailable`."""
        options = {"trust_remote_code": False, "local_files_only": True}
        try:
            tokenizer = tokenizer_utils.load(path, options)
            config = read_object(path / "config.json")
            stops = set(tokenizer.eos_token_ids) | _stop_tokens(path, config)
            size = text_number(config, "vocab_size", "padded_vocab_size") or len(tokenizer)
            return cls(tokenizer, stop_token_ids=frozenset(stops), vocabulary_size=size)
        except ModelUnavailable as error:
            raise ModelUnavailable(f'model "{printable(path.name)}": {error.message}') from None
        except BaseException as error:
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            reason = printable(f"{type(error).__name__}: {error}".replace(str(path), "its folder"))
            name = printable(path.name)
            raise ModelUnavailable(
                f'the tokenizer of "{name}" cannot be loaded ({reason}); download it again'
            ) from error

    @property
    def has_chat_template(self) -> bool:
        return bool(self._renderers)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt tokens of a chat, up to where the answer begins. Raises `InvalidRequest`."""
        return self._encode(self.render_text(messages, tools, template_arguments))

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat as text, special tokens included. Raises `InvalidRequest`."""
        renderer = self._renderers.get("tool_use" if tools else "default") or self._renderers.get("default")
        if renderer is None:
            raise InvalidRequest(NO_TEMPLATE, parameter="messages")
        variables = self._names | checked_arguments(template_arguments or {}, self._names)
        variables |= {
            "messages": plain_messages(messages),
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return renderer(variables)
        except Exception as error:  # a template fails in any way it likes
            detail = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            message = f"the chat template of this model refuses the request: {' '.join(detail.split())[:500]}"
            raise InvalidRequest(message, parameter="messages") from error

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, begun by BOS when this tokenizer does that. Raises `InvalidRequest`."""
        tokens = self._encode(text)
        return tokens if tuple(tokens[:1]) == self._start else [*self._start, *tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer; exactly what `TextStream` tells piece by piece."""
        detokenizer = self.detokenizer()
        pieces = [detokenizer.add(token) for token in tokens if token not in self.hidden_token_ids]
        return "".join([*pieces, detokenizer.finish()])

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """A fresh detokenizer; with `after` (the prompt) the text continues it and keeps its leading space."""
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes, trim=self._trims and not after)
        return WindowDetokenizer(self._decode_window, [token for token in after if token not in self.hidden_token_ids])

    def token_text(self, token: int) -> tuple[str, bytes]:
        """One token alone as `logprobs` show it: text (U+FFFD for part of a character) and its bytes."""
        if self._bytes is not None:
            found = self._bytes(token)
        else:
            found = self._decode_window([token]).encode("utf-8", "replace") if 0 <= token < len(self.tokenizer) else b""
        return found.decode("utf-8", "replace"), found

    def _encode(self, text: str) -> list[int]:
        try:
            tokens = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        except BaseException as error:
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise InvalidRequest("the text cannot be tokenized: it is not valid Unicode") from error
        if max(tokens, default=0) >= self.vocabulary_size:
            raise InvalidRequest("the text holds a special token that this model has no place for")
        return list(tokens)

    def _decode_window(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def _agrees(self) -> bool:
        tokens = self.tokenizer.encode(PROBE, add_special_tokens=False)
        return self.decode(tokens) == str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _renderers(tokenizer: Any) -> dict[str, Renderer]:
    """The templates of the folder by name; one that does not compile refuses every chat with the reason."""
    if tokenizer.init_kwargs.get("chat_template_type"):
        return {"default": lambda variables: _render_natively(tokenizer, variables)}
    found = tokenizer.chat_template
    sources = found if isinstance(found, dict) else {"default": found}
    return {name: _renderer(source) for name, source in sources.items() if isinstance(source, str)}


def _renderer(source: str) -> Renderer:
    try:
        return ChatTemplate(source).render
    except (TemplateError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        reason = f"it cannot be compiled ({' '.join(str(error).split())[:200]}); use /v1/completions"

    def refuse(_variables: dict[str, Any]) -> str:
        raise TemplateError(reason)

    return refuse


def _render_natively(tokenizer: Any, variables: dict[str, Any]) -> str:
    """mlx-lm renders a few models in Python of its own (`chat_template_type`), not in code of the folder."""
    own = {"messages", "documents", *tokenizer.special_tokens_map}
    arguments = {name: value for name, value in variables.items() if name not in own}
    return str(tokenizer.apply_chat_template(variables["messages"], tokenize=False, **arguments))


def _hidden(tokenizer: Any) -> frozenset[int]:
    """Special tokens of the vocabulary, without those that tool and reasoning parsers look for in the text."""
    added = {token: entry.content for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    marks = (tokenizer.tool_call_start, tokenizer.tool_call_end, tokenizer.think_start, tokenizer.think_end)
    shown = "\0".join(mark for mark in (*marks, *tokenizer.structural_markers) if mark)
    return frozenset(token for token, text in added.items() if text not in shown)


def _stop_tokens(path: Path, config: Mapping[str, Any]) -> set[int]:
    """`eos_token_id` (one or several) of config.json and generation_config.json."""
    generation = read_object(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    nested = config.get("text_config")
    parts = (config, generation, nested if isinstance(nested, dict) else {})
    listed = [part.get("eos_token_id") for part in parts]
    ids = [token for entry in listed for token in (entry if isinstance(entry, list) else [entry])]
    return {token for token in ids if isinstance(token, int) and not isinstance(token, bool) and token >= 0}


def _is_panic(error: BaseException) -> bool:
    """A Rust panic in `tokenizers` is a BaseException, so that `except Exception` misses it."""
    return type(error).__name__ == "PanicException"
