"""Text processing of one model: chat template, tokenizer, stop tokens. Runs in its own process (`app.worker.texts`).

No code of the model folder is executed: the tokenizer is built from data files without network or remote code, and
the template runs in a sandbox. A client's mistakes raise `InvalidRequest`, a broken folder `ModelUnavailable`. Nothing
here bounds the time and memory of tokenizer and template: `app.worker.texts` does, by ending the process.
"""

import contextlib
import importlib
import inspect
import json
import pkgutil
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from types import GeneratorType
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from mlx_lm import chat_templates, tokenizer_utils
from transformers import AutoTokenizer

from app.core.errors import InvalidRequest, ModelUnavailable, context_overflow
from app.core.request import Notice
from app.models.config_values import VOCABULARY_KEYS, context_tokens, text_number
from app.models.prompt_size import check_bytes, text_bytes
from app.models.safe_files import DOWNLOAD_AGAIN, printable, read_object
from app.text.detokenizer import TokenTable, build_token_table
from app.text.dialect import Dialect, read_dialect, visible_markers
from app.text.prompt.messages import checked_arguments, plain_messages
from app.text.prompt.rendering import Rendering, RenderTemplate, Template
from app.text.prompt.turns import Conversation


class ChatTemplate:
    """Untrusted template, compiled in jinja2's immutable sandbox with only the names that transformers adds."""

    def __init__(self, source: str) -> None:
        """Compile; raises jinja2's `TemplateError`, `RecursionError` or `ValueError` if that is impossible."""
        environment = _Sandbox(
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
        """Render the text; raises whatever the template raises."""
        return self._template.render(**variables)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, but errors are raised as they are: rewriting their tracebacks takes longer than rendering."""

    def handle_exception(self, source: str | None = None) -> NoReturn:  # noqa: ARG002 - jinja2's signature
        raise  # noqa: PLE0704 - called while an error is handled


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; only its body is rendered."""

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
    """Write JSON without HTML escapes; generators, which filters return, become lists."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_to_list,
    )


def _to_list(value: Any) -> list[Any]:
    if isinstance(value, GeneratorType):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - the user's own date


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


NO_TEMPLATE = "this model has no chat template: use /v1/completions"
MAX_FILE_BYTES = 128 * 1024 * 1024
"""Largest tokenizer file, in bytes; the largest published files are a quarter of that."""
CHARACTERS_PER_TOKEN = 4
"""Characters per token of the context limit in the first prefix of a text that is tokenized."""

FILL_IN_MIDDLE_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""Special tokens before the prefix, before the suffix, and before the middle that the answer fills in."""

StageCallback = Callable[[str, int], None]
"""Callback with the stage that begins (`render`, `tokenize`) and the size of its input in bytes."""


class ChatPrompt(NamedTuple):
    """The tokens of a chat."""

    tokens: list[int]
    checkpoints: tuple[int, ...] = ()
    """Token positions, ascending, where later prompts will probably diverge."""
    notices: tuple[Notice, ...] = ()
    """Notices about repairs, and about texts that the template omits."""


class TextModel:
    """Tokenizer and chat template of one model folder."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_token_ids: frozenset[int],
        vocabulary_size: int,
        max_context_tokens: int,
        on_stage: StageCallback = lambda _what, _size: None,
    ) -> None:
        """Take a tokenizer of transformers; `load` is the usual constructor."""
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.vocabulary_size = vocabulary_size
        """Number of ids that the model has logits for, padding included."""
        dialect = read_dialect(tokenizer)
        self.table: TokenTable = build_token_table(
            tokenizer,
            hidden=_hidden_tokens(tokenizer, dialect),
            stops=stop_token_ids,
            vocabulary_size=vocabulary_size,
            dialect=dialect,
        )
        self._max_context_tokens = max_context_tokens
        self._longest_token_bytes = max([len(piece) for piece in self.table.pieces], default=1)
        self._special_tokens = {
            name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)
        }
        self._templates = _templates(tokenizer, dialect)
        self._bos_prefix = tuple(tokenizer.encode("")[:1])
        if self._bos_prefix != (tokenizer.bos_token_id,):
            self._bos_prefix = ()
        self._on_stage = on_stage

    @classmethod
    def load(cls, path: Path, on_stage: StageCallback = lambda _what, _size: None) -> "TextModel":
        """Read a folder. Raises `ModelUnavailable`."""
        try:
            _check_files(path)
            config = read_object(path / "config.json")
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
            if tokenizer.chat_template is None:
                tokenizer.chat_template = _separate_template(path)
            stops = {tokenizer.eos_token_id} - {None} | _stop_tokens(path, config)
            return cls(
                tokenizer,
                stop_token_ids=frozenset(stops),
                vocabulary_size=text_number(config, *VOCABULARY_KEYS) or len(tokenizer),
                max_context_tokens=context_tokens(config),
                on_stage=on_stage,
            )
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
        return bool(self._templates)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        *,
        max_context_tokens: int | None = None,
        continues: bool = False,
    ) -> ChatPrompt:
        """Tokenize the prompt of a chat, with checkpoints where later prompts diverge and notices of its repairs.

        Later prompts diverge after the system part, at the last user turn, and before the answer begins (templates
        strip earlier reasoning). `continues`: the answer continues the last message. Raises `InvalidRequest`.
        """
        limit = self._limit(max_context_tokens)
        size = text_bytes([messages, tools])
        check_bytes(size, limit, self._longest_token_bytes)
        rendering = self._rendering(messages, tools, template_arguments)
        rendered = rendering.continued() if continues else rendering.prompt()
        tokens = self._encode(rendered.text, limit)
        positions = []
        for other, opens_answer in rendering.variants(continues=continues):
            self._on_stage("render", size)
            with contextlib.suppress(Exception):  # a variant that the template refuses has no position
                varied = rendering.render_variant(other, rendered.repairs, opens_answer=opens_answer)
                positions.append(_shared_length(rendered.text, varied))
        return ChatPrompt(tokens, self._token_positions(rendered.text, tokens, positions), rendered.notices)

    def _token_positions(self, text: str, tokens: list[int], positions: Sequence[int]) -> tuple[int, ...]:
        """Convert character positions in the text to the numbers of tokens before them, ascending."""
        ends = list(accumulate(len(self.table.token_text(token)[1]) for token in tokens))
        if ends and ends[-1] == text_bytes(text):
            counts = {bisect_right(ends, text_bytes(text[:position])) for position in positions}
        else:  # the tokenizer changes the text, for example by adding spaces
            counts = {_shared_length(tokens, self._tokenize(text[:position])) for position in positions}
        return tuple(sorted(count for count in counts if 0 < count < len(tokens)))

    def _rendering(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any] | None,
    ) -> Rendering:
        template = self._templates.get("tool_use" if tools else "default") or self._templates.get("default")
        if template is None:
            raise InvalidRequest(NO_TEMPLATE, parameter="messages")
        variables = (
            self._special_tokens
            | checked_arguments(template_arguments or {}, self._special_tokens)
            | {"documents": None}
        )
        self._on_stage("render", text_bytes([messages, tools]))
        conversation = Conversation(plain_messages(messages), [dict(tool) for tool in tools] if tools else None)
        return Rendering(template, variables, conversation)

    def fill_in_middle_prompt(self, text: str, suffix: str) -> str:
        """Return the prompt whose answer fills the middle. Raises InvalidRequest if the model lacks the tokens."""
        vocabulary = self.tokenizer.get_vocab()
        special_tokens = next(
            (
                special_tokens
                for special_tokens in FILL_IN_MIDDLE_TOKENS
                if all(special_token in vocabulary for special_token in special_tokens)
            ),
            None,
        )
        if special_tokens is None:
            raise InvalidRequest("this model cannot fill in a middle: leave out suffix", parameter="suffix")
        begin, hole, end = special_tokens
        return f"{begin}{text}{hole}{suffix}{end}"

    def encode(self, text: str, *, max_context_tokens: int | None = None) -> list[int]:
        """Tokenize a plain prompt, with BOS first if this tokenizer adds it. Raises `InvalidRequest`."""
        tokens = self._encode(text, self._limit(max_context_tokens))
        return tokens if tuple(tokens[:1]) == self._bos_prefix else [*self._bos_prefix, *tokens]

    def encode_with_special_tokens(self, text: str, *, max_context_tokens: int | None = None) -> list[int]:
        """Tokenize a text for an embedding, between the special tokens that this tokenizer adds."""
        tokens = self._encode(text, self._limit(max_context_tokens))
        before, after = self._special_affixes
        return [*before, *tokens, *after]

    @cached_property
    def _special_affixes(self) -> tuple[list[int], list[int]]:
        whole, bare = self.tokenizer.encode("a"), self.tokenizer.encode("a", add_special_tokens=False)
        starts = range(len(whole) - len(bare) + 1)
        start = next((start for start in starts if whole[start : start + len(bare)] == bare), 0)
        return whole[:start], whole[start + len(bare) :]

    def _limit(self, max_context_tokens: int | None) -> int:
        return min(self._max_context_tokens, max_context_tokens or self._max_context_tokens)

    def _encode(self, text: str, limit: int) -> list[int]:
        """Tokenize ever longer prefixes of a text, so that a text beyond the context fails early."""
        check_bytes(text_bytes(text), limit, self._longest_token_bytes)
        characters = max(1024, CHARACTERS_PER_TOKEN * limit)
        tokens = self._tokenize(text[:characters])
        while characters < len(text):
            if len(tokens) > limit + self._longest_token_bytes:  # the cut may have split one token into its bytes
                raise context_overflow(len(tokens), limit, f"more than {limit}")
            characters *= 2
            tokens = self._tokenize(text[:characters])
        if max(tokens, default=0) >= self.vocabulary_size:
            raise InvalidRequest("the text contains a special token outside this model's vocabulary")
        return tokens

    def _tokenize(self, text: str) -> list[int]:
        self._on_stage("tokenize", text_bytes(text))
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))
        except BaseException as error:
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            if any(map(_is_surrogate, text)):
                raise InvalidRequest("the text cannot be tokenized: it is not valid Unicode") from error
            reason = printable(f"{type(error).__name__}: {error}")
            raise ModelUnavailable(
                f"the tokenizer failed on this text ({reason}); send another one, or download the model again"
            ) from error


def _is_surrogate(letter: str) -> bool:
    return "\ud800" <= letter <= "\udfff"


def _shared_length(first: Any, second: Any) -> int:
    """Return the length of the common beginning of two sequences."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def _check_files(path: Path) -> None:
    """Raise for files that would make a library wait forever or read for minutes."""
    for file in path.iterdir():
        if not (file.is_file() or file.is_dir()):
            raise ModelUnavailable(f"{printable(file.name)} is not a regular file; {DOWNLOAD_AGAIN}")
        if "tokenizer" in file.name and file.stat().st_size > MAX_FILE_BYTES:
            raise ModelUnavailable(f"{printable(file.name)} is over {MAX_FILE_BYTES >> 20} MiB; {DOWNLOAD_AGAIN}")


def _separate_template(path: Path) -> str | None:
    """Return the template of a folder whose tokenizer has none, as models that read pictures store it."""
    file = path / "chat_template.json"
    template = read_object(file).get("chat_template") if file.is_file() else None
    return template if isinstance(template, str) else None


def _templates(tokenizer: Any, dialect: Dialect) -> dict[str, Template]:
    """Return the templates of the folder by name; one that cannot be compiled refuses every chat, with the reason."""
    native = str(tokenizer.init_kwargs.get("chat_template_type") or "")
    if native in {module.name for module in pkgutil.iter_modules(chat_templates.__path__)}:
        module = importlib.import_module(f"{chat_templates.__name__}.{native}")
        wrapped = tokenizer_utils.TokenizerWrapper(tokenizer, chat_template=module.apply_chat_template)
        source = inspect.getsource(module)
        return {"default": Template(lambda variables: _render_natively(wrapped, variables), source, dialect)}
    chat_template = tokenizer.chat_template
    sources = chat_template if isinstance(chat_template, dict) else {"default": chat_template}
    named = {name: source for name, source in sources.items() if isinstance(source, str)}
    return {name: Template(_renderer(source), source, dialect) for name, source in named.items()}


def _renderer(source: str) -> RenderTemplate:
    """Compile on first use: jinja2 evaluates constants when it compiles, so a bomb breaks chats, not completions."""

    @cache
    def compiled() -> ChatTemplate:
        try:
            return ChatTemplate(source)
        except (TemplateError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            reason = f"it cannot be compiled ({' '.join(str(error).split())[:200]}); use /v1/completions"
            raise TemplateError(reason) from error

    return lambda variables: compiled().render(variables)


def _render_natively(tokenizer: Any, variables: dict[str, Any]) -> str:
    """Render with mlx-lm's Python code, which a few models need (`chat_template_type`), not with code of the folder."""
    reserved = {"messages", "documents", *tokenizer.special_tokens_map}
    arguments = {name: value for name, value in variables.items() if name not in reserved}
    return str(tokenizer.apply_chat_template(variables["messages"], tokenize=False, **arguments))


def _hidden_tokens(tokenizer: Any, dialect: Dialect) -> frozenset[int]:
    """Return the vocabulary's special tokens, without those that the dialect looks for in the text."""
    added = {token: entry.content for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    shown = visible_markers(dialect)
    return frozenset(token for token, text in added.items() if text not in shown)


def _stop_tokens(path: Path, config: Mapping[str, Any]) -> set[int]:
    """Collect `eos_token_id` (one or several) from config.json and generation_config.json."""
    generation = read_object(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    nested = config.get("text_config")
    sections = (config, generation, nested if isinstance(nested, dict) else {})
    listed = [part.get("eos_token_id") for part in sections]
    ids = [token for entry in listed for token in (entry if isinstance(entry, list) else [entry])]
    return {token for token in ids if isinstance(token, int) and not isinstance(token, bool) and token >= 0}


def _is_panic(error: BaseException) -> bool:
    """Return whether an error is a Rust panic in `tokenizers`: a BaseException, which `except Exception` misses."""
    return type(error).__name__ == "PanicException"
