"""Facts about the vocabulary in a tokenizer's files, without a tokenizer library.

A draft model needs the main model's tokenizer: every id must mean the same in both, added tokens included. Server and
worker share this check. Vocabulary sizes prove nothing: embeddings are padded differently within one family (151,936
and 152,064 rows for the same Qwen 2.5 tokens). A tokenizer file is read again only after it has changed. Its facts are
cached in memory and in a small file that outlasts a restart, so tokenizers are compared by their digests.
"""

import contextlib
import functools
import hashlib
import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from app.core.errors import DiskUnavailable, ModelUnavailable
from app.core.patience import patient
from app.machine.own_files import read_json_as, write_privately
from app.models.safe_files import DOWNLOAD_AGAIN, read_file

MAX_TOKENIZER_BYTES = 128 * 1024 * 1024
MAX_PIECES = 2_000_000
"""Maximum number of vocabulary pieces, over eight times the largest published vocabulary; above it, decoding fails."""
OPAQUE_FILES = ("tokenizer.model", "vocab.json", "tekken.json")
"""Tokenizer files that are compared byte by byte when there is no `tokenizer.json`."""
MAX_TOKEN_ID = 1 << 31
ORDINARY = "\0ordinary"
"""Role of an id that stands for text; no special token has this name."""
INCOMPARABLE = "its tokenizer cannot be compared; both models need a tokenizer.json"

FORMAT_VERSION = 2
"""Format version of the cache file; a file of another version is rebuilt."""
MAX_CACHED_FILES, MAX_CACHED_DIFFERENCES = 512, 1024
MAX_CACHE_BYTES = 16 * 1024 * 1024
MAX_FACTS_BYTES = 256 * 1024
DIGEST_BATCH_TOKENS = 8192
READ_SECONDS = 30.0
"""Longest wait for a file that another thread is reading."""

Stamp = tuple[int, int, int, int]
"""Inode, size and times of a file; at least one of them differs after a change."""

MEDIA = re.compile(r"image|audio|video|vision")
"""Pattern of special tokens that stand for pictures and sound, for which a small model of the family may lack rows."""
Value = TypeVar("Value")
logger = logging.getLogger("paceline.tokenizers")


class TokenizerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one tokenizer."""

    tokens: str = ""
    """Digest of all ids with their pieces, added tokens included; empty if the folder has no tokenizer file."""
    words: str = ""
    """Digest of all ids with their pieces except the added tokens; empty where the file lists no pieces."""
    ordinary: tuple[tuple[int, int], ...] = ()
    """The ids that stand for text, as half-open ranges."""
    special: dict[int, str] = {}
    longest_bytes: int = 0
    """Bytes of the longest piece of text; 0 where unknown."""
    problem: str = ""
    """Reason why the file cannot be used; empty if it can."""


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Pieces(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    """BPE and WordPiece map pieces to ids; Unigram lists (piece, score) in the order of the ids."""


class _TokenizerJson(msgspec.Struct):
    """Fields of `tokenizer.json` that are read."""

    model: _Pieces
    added_tokens: list[_Added] | None = None


class _CacheFile(msgspec.Struct):
    """Content of the cache file: stamps and digests by path, facts by digest, differences by pair of digests."""

    form: int = FORMAT_VERSION
    files: dict[str, tuple[Stamp, str]] = {}
    contents: dict[str, TokenizerFacts] = {}
    differences: dict[str, str] = {}


class TokenizerCache:
    """Caches facts about tokenizers in memory and in the file at `path` (None: in memory only). Thread-safe.

    `read` takes a path and the maximum number of bytes to read, and raises `ModelUnavailable`.
    """

    def __init__(self, path: Path | None = None, read: Callable[[Path, int], bytes] = read_file) -> None:
        self._path = path
        self._read_file = read
        self._load_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._loaded_cache: _CacheFile | None = None

    def cached_facts(self, file: "TokenizerFile") -> TokenizerFacts | None:
        """Return the cached facts of this file; None if it must be read. Never reads it."""
        entry = self._load_cache().files.get(str(file.path))
        return self._load_cache().contents.get(entry[1]) if entry is not None and entry[0] == file.stamp else None

    def facts(self, file: "TokenizerFile") -> TokenizerFacts:
        """Return the facts of this file, reading it if necessary. Raises `DiskUnavailable`."""
        facts = self.cached_facts(file)
        if facts is not None:
            return facts
        with self._reading():  # each file only once
            facts = self.cached_facts(file)
            if facts is None:
                facts = self._read(file)
                self._save()
            return facts

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Hold the lock with which one file is read at a time. Raises `DiskUnavailable` if one takes too long."""
        if not self._read_lock.acquire(timeout=READ_SECONDS):
            raise DiskUnavailable("a tokenizer is still being read: try again soon")
        try:
            yield
        finally:
            self._read_lock.release()

    def difference(self, key: str, main: Path, draft: Path, compare: "VocabularyComparison") -> str:
        """Return the result of `compare` for two `tokenizer.json`, cached under `key`."""
        cached = self._load_cache()
        if key not in cached.differences:
            with self._reading():
                main_vocabulary, draft_vocabulary = (
                    _decode(self._read_file(path, MAX_TOKENIZER_BYTES)) for path in (main, draft)
                )
                cached.differences[key] = compare(main_vocabulary, draft_vocabulary)
                self._save()
        return cached.differences[key]

    def _read(self, file: "TokenizerFile") -> TokenizerFacts:
        path, cached = file.path, self._load_cache()
        try:
            content = self._read_file(path, MAX_TOKENIZER_BYTES)
        except DiskUnavailable:
            raise
        except ModelUnavailable as error:
            key, facts = f"! {error.message}", TokenizerFacts(problem=error.message)
        else:
            key = f"{path.name} {hashlib.sha256(content).hexdigest()}"
            facts = cached.contents.get(key) or _facts(path.name, key, content)
        cached.contents[key] = facts
        cached.files.pop(str(path), None)
        cached.files[str(path)] = (file.stamp, key)
        return facts

    def _load_cache(self) -> _CacheFile:
        with self._load_lock:
            if self._loaded_cache is None:
                self._loaded_cache = _read_cache_file(self._path)
            return self._loaded_cache

    def _save(self) -> None:
        """Write the cache, merged with what another process has written; drop the oldest entries beyond the limits."""
        if self._path is None:
            return
        current, on_disk = self._load_cache(), _read_cache_file(self._path)
        files = _newest({**on_disk.files, **current.files}, MAX_CACHED_FILES)
        contents = {**on_disk.contents, **current.contents}
        used = {key: contents[key] for _, key in files.values() if key in contents}
        cached = _CacheFile(
            files=files,
            contents={key: facts for key, facts in used.items() if len(msgspec.json.encode(facts)) <= MAX_FACTS_BYTES},
            differences=_newest({**on_disk.differences, **current.differences}, MAX_CACHED_DIFFERENCES),
        )
        try:
            write_privately(self._path, msgspec.json.encode(cached))
        except OSError as error:
            logger.warning("the tokenizer cache cannot be saved: %s", error.strerror)


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer file, as it was at one moment."""

    path: Path
    stamp: Stamp


@patient(otherwise=DiskUnavailable)
def _file_in(folder: Path) -> TokenizerFile | None:
    """Return the tokenizer file in use; None when the folder has none."""
    path = next((path for name in ("tokenizer.json", *OPAQUE_FILES) if (path := folder / name).is_file()), None)
    return None if path is None else TokenizerFile(path, _stamp(path))


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of one model folder, as it was at the first look; the catalog makes another one after a change.

    Reading raises `ModelUnavailable`, or `OSError` when the folder vanishes.
    """

    folder: Path
    cache: TokenizerCache

    @functools.cached_property
    def file(self) -> TokenizerFile | None:
        """The tokenizer file in use; None when the folder has none. Raises `DiskUnavailable`."""
        return _file_in(self.folder)

    @property
    def is_cached(self) -> bool:
        """Whether its facts are available without reading a file, or cannot be had at present."""
        with contextlib.suppress(DiskUnavailable):
            return self.file is None or self.cache.cached_facts(self.file) is not None
        return True

    def facts(self) -> TokenizerFacts:
        """Return its facts."""
        facts = self.cache.facts(self.file) if self.file is not None else TokenizerFacts()
        if facts.problem:
            raise ModelUnavailable(facts.problem)
        return facts

    def longest_bytes(self) -> int:
        """Return the length in bytes of the longest token; 0 where unknown. Never raises."""
        with contextlib.suppress(ModelUnavailable, OSError):
            return self.facts().longest_bytes
        return 0

    def shares_tokens(self, draft: "Tokenizer") -> bool:
        """Return whether every id means the same in both."""
        main_digest = self.facts().tokens
        return bool(main_digest) and main_digest == draft.facts().tokens

    def mismatch(self, draft: "Tokenizer", rows: int) -> str:
        """Return why a model with tokenizer `draft` and `rows` embedding rows (0: unknown) cannot draft; "" if it can.

        The server calls this to pair models, the worker to load them.
        """
        if not self.shares_tokens(draft):
            return self.difference(draft)
        facts = draft.facts()
        words = [token for token, content in facts.special.items() if not MEDIA.search(content)]
        highest = max([*words, *(end - 1 for _, end in facts.ordinary)], default=-1)
        return f"its embedding of {rows} rows lacks token {highest}; {DOWNLOAD_AGAIN}" if 0 < rows <= highest else ""

    def difference(self, draft: "Tokenizer") -> str:
        """Describe the lowest id that does not mean the same in both; "" when all do."""
        main_facts, draft_facts = self.facts(), draft.facts()
        if self.shares_tokens(draft):
            return ""
        if not (main_facts.words and draft_facts.words):
            return INCOMPARABLE
        difference = self._cached_difference(draft, f"{main_facts.tokens} {draft_facts.tokens}", _first_difference)
        return f"it has a different tokenizer: {difference}; choose a draft model of the same family"

    def text_difference(self, draft: "Tokenizer") -> str:
        """Describe the lowest id that stands for one piece of text here and another in `draft`; "" when there is none.

        Added tokens, and ids that only one of the tokenizers has, are ignored.
        """
        main_facts, draft_facts = self.facts(), draft.facts()
        if not (main_facts.words and draft_facts.words) or main_facts.words == draft_facts.words:
            return ""
        return self._cached_difference(draft, f"words {main_facts.words} {draft_facts.words}", _first_text_difference)

    def _cached_difference(self, draft: "Tokenizer", key: str, compare: "VocabularyComparison") -> str:
        files = self.folder / "tokenizer.json", draft.folder / "tokenizer.json"
        return self.cache.difference(key, *files, compare)

    def token_role(self, token: int) -> str:
        """Return `ORDINARY` for an id that stands for text, the name of a special token, "" for an unused id."""
        facts = self.facts()
        if any(begin <= token < end for begin, end in facts.ordinary):
            return ORDINARY
        return facts.special.get(token, "")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """All pieces by id, and the added tokens by id."""

    pieces: Mapping[int, str]
    added: Mapping[int, _Added]

    @property
    def words(self) -> dict[int, str]:
        return {token: piece for token, piece in self.pieces.items() if token not in self.added}


VocabularyComparison = Callable[[_Vocabulary, _Vocabulary], str]


def _first_difference(main: _Vocabulary, draft: _Vocabulary) -> str:
    """Describe the lowest id that does not mean the same in both; "" when all do."""
    return _describe_first_difference(main.pieces.keys() | draft.pieces.keys(), main.pieces, draft.pieces)


def _first_text_difference(main: _Vocabulary, draft: _Vocabulary) -> str:
    main_words, draft_words = main.words, draft.words
    return _describe_first_difference(main_words.keys() & draft_words.keys(), main_words, draft_words)


def _describe_first_difference(ids: Iterable[int], main: Mapping[int, str], draft: Mapping[int, str]) -> str:
    for token in sorted(ids):
        if main.get(token) != draft.get(token):
            main_text, draft_text = _quote(main.get(token)), _quote(draft.get(token))
            return f"token {token} is {main_text} in the main model and {draft_text} in the draft"
    return ""


def _facts(name: str, digest: str, content: bytes) -> TokenizerFacts:
    if name != "tokenizer.json":
        return TokenizerFacts(tokens=digest)
    try:
        vocabulary = _decode(content)
    except ModelUnavailable as error:
        return TokenizerFacts(problem=error.message)
    ids = sorted(vocabulary.pieces)
    special = {token: added_token.content for token, added_token in vocabulary.added.items() if added_token.special}
    return TokenizerFacts(
        tokens=_digest(vocabulary.pieces, ids),
        words=_digest(vocabulary.pieces, [token for token in ids if token not in vocabulary.added]),
        ordinary=tuple(_ranges(token for token in ids if token not in special)),
        special=special,
        longest_bytes=max((len(piece.encode()) for piece in vocabulary.pieces.values()), default=0),
    )


def _decode(content: bytes) -> _Vocabulary:
    if content.count(b":") > MAX_PIECES or content.count(b"[") > MAX_PIECES:
        raise ModelUnavailable(f"tokenizer.json holds more than {MAX_PIECES:,} pieces; {DOWNLOAD_AGAIN}")
    try:
        decoded = msgspec.json.decode(content, type=_TokenizerJson)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise ModelUnavailable(f"tokenizer.json is not valid; {DOWNLOAD_AGAIN}") from None
    vocab = decoded.model.vocab
    listed = ((piece, token) for token, (piece, _) in enumerate(vocab)) if isinstance(vocab, list) else vocab.items()
    added = {added_token.id: added_token for added_token in decoded.added_tokens or ()}
    pieces = {token: piece for piece, token in listed} | {
        token: added_token.content for token, added_token in added.items()
    }
    if not all(0 <= token < MAX_TOKEN_ID for token in pieces):
        raise ModelUnavailable(f"tokenizer.json is not valid; {DOWNLOAD_AGAIN}")
    return _Vocabulary(pieces, added)


def _digest(pieces: Mapping[int, str], ids: Sequence[int]) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(ids), DIGEST_BATCH_TOKENS):
        batch = ((token, pieces[token]) for token in ids[start : start + DIGEST_BATCH_TOKENS])
        digest.update("".join(f"{token}:{len(piece)}:{piece}\n" for token, piece in batch).encode())
    return digest.hexdigest()


def _ranges(ids: Iterable[int]) -> Iterable[tuple[int, int]]:
    for _, run in itertools.groupby(enumerate(ids), lambda entry: entry[1] - entry[0]):
        tokens = [token for _, token in run]
        yield tokens[0], tokens[-1] + 1


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:
        return (0, -1, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _read_cache_file(path: Path | None) -> _CacheFile:
    """Read the cache file; empty if it is missing, damaged or of another version."""
    cached = None if path is None else read_json_as(path, _CacheFile, MAX_CACHE_BYTES)
    return cached if cached is not None and cached.form == FORMAT_VERSION else _CacheFile()


def _newest(entries: Mapping[str, Value], count: int) -> dict[str, Value]:
    return dict(list(entries.items())[-count:])


def _quote(piece: str | None) -> str:
    return "unused" if piece is None else repr(piece[:40])
