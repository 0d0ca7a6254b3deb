"""The pieces of text that token ids stand for, from the files of a tokenizer, without a tokenizer library.

Two models may draft for one another when every id means the same in both, added tokens included; server and worker both
ask here. Sizes prove nothing: embeddings are padded differently within one family (151,936 and 152,064 rows for the
same Qwen 2.5 tokens). A file is read once, and again when it changed: its facts are remembered by its stamp, and in a
small file from one start to the next, so that two tokenizers are compared by their digests.
"""

import contextlib
import hashlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from app.core.errors import DiskUnavailable, ModelUnavailable
from app.machine.own_files import read_kept
from app.models.safe_files import DOWNLOAD_AGAIN, read_file, write_privately

MAX_TOKENIZER_BYTES = 128 * 1024 * 1024
MAX_PIECES = 2_000_000
"""Limit of pieces, over eight times the largest published vocabulary; a file that could hold more is not decoded."""
OPAQUE_FILES = ("tokenizer.model", "vocab.json", "tekken.json")
"""Tokenizer files that are compared byte by byte when there is no `tokenizer.json`."""
HIGHEST_ID = 1 << 31
ORDINARY = "\0ordinary"
"""Use of an id that stands for text; no special token has this name."""
INCOMPARABLE = "its tokenizer cannot be compared; both models need a tokenizer.json"

FORM = 2
"""Format version of the kept file; a file of another version is made anew."""
KEPT_FILES, KEPT_DIFFERENCES = 512, 1024
MAX_KEPT_BYTES = 16 * 1024 * 1024
MAX_FACTS_BYTES = 256 * 1024
LINES = 8192

Stamp = tuple[int, int, int, int]
"""Inode, size and times of a file, which differ once it has changed."""

Value = TypeVar("Value")
_logger = logging.getLogger("paceline.tokenizers")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one tokenizer."""

    tokens: str = ""
    """Digest of every id with its piece, added ones included; empty without any tokenizer file."""
    words: str = ""
    """The same without the added ones; empty where the file lists no pieces."""
    ordinary: tuple[tuple[int, int], ...] = ()
    """The ids that stand for text, as half-open ranges."""
    special: dict[int, str] = {}
    highest: int = -1
    """The highest id; -1 where it is unknown."""
    longest_bytes: int = 0
    """Bytes of the longest piece of text; 0 where unknown."""
    problem: str = ""
    """Why the file cannot be used."""


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Pieces(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    """BPE and WordPiece map pieces to ids; Unigram lists (piece, score) in the order of the ids."""


class _Content(msgspec.Struct):
    """The part of `tokenizer.json` that is read."""

    model: _Pieces
    added_tokens: list[_Added] | None = None


class _Kept(msgspec.Struct):
    """Facts kept from one start to the next: files by path, contents by digest, differences by both digests."""

    form: int = FORM
    files: dict[str, tuple[Stamp, str]] = {}
    contents: dict[str, Facts] = {}
    differences: dict[str, str] = {}


class TokenizerCache:
    """Remembers tokenizers, in memory and in the file `kept` (None: in memory only). Calls may come from any thread.

    `read` takes a path and the most bytes to read, and raises `ModelUnavailable`.
    """

    def __init__(self, kept: Path | None = None, read: Callable[[Path, int], bytes] = read_file) -> None:
        self._path = kept
        self._read_file = read
        self._loading, self._reading = threading.Lock(), threading.Lock()
        self._kept: _Kept | None = None

    def known(self, path: Path) -> Facts | None:
        """Return the remembered facts of this file as it is now; None: it has to be read. Never reads it."""
        entry = self._recall().files.get(str(path))
        return self._recall().contents.get(entry[1]) if entry is not None and entry[0] == _stamp(path) else None

    def facts(self, path: Path) -> Facts:
        """Return the facts of this file, which is read if it must be. Raises `DiskUnavailable`."""
        facts = self.known(path)
        if facts is not None:
            return facts
        with self._reading:  # one file at a time, and none of them twice
            facts = self.known(path)
            if facts is None:
                facts = self._read(path)
                self._keep()
            return facts

    def difference(self, key: str, main: Path, draft: Path, find: "Comparison") -> str:
        """Return what `find` says about two `tokenizer.json`, or said earlier under this key."""
        kept = self._recall()
        if key not in kept.differences:
            with self._reading:
                ours, theirs = (_decode(self._read_file(path, MAX_TOKENIZER_BYTES)) for path in (main, draft))
                kept.differences[key] = find(ours, theirs)
                self._keep()
        return kept.differences[key]

    def _read(self, path: Path) -> Facts:
        stamp, kept = _stamp(path), self._recall()
        try:
            content = self._read_file(path, MAX_TOKENIZER_BYTES)
        except DiskUnavailable:
            raise
        except ModelUnavailable as error:
            key, facts = f"! {error.message}", Facts(problem=error.message)
        else:
            key = f"{path.name} {hashlib.sha256(content).hexdigest()}"
            facts = kept.contents.get(key) or _facts(path.name, key, content)
        kept.contents[key] = facts
        kept.files.pop(str(path), None)
        kept.files[str(path)] = (stamp, key)
        return facts

    def _recall(self) -> _Kept:
        with self._loading:
            if self._kept is None:
                self._kept = _kept_in(self._path)
            return self._kept

    def _keep(self) -> None:
        """Write what is known now and what another process found meanwhile; drop the oldest beyond the limits."""
        if self._path is None:
            return
        ours, theirs = self._recall(), _kept_in(self._path)
        files = _last({**theirs.files, **ours.files}, KEPT_FILES)
        contents = {**theirs.contents, **ours.contents}
        used = {key: contents[key] for _, key in files.values() if key in contents}
        kept = _Kept(
            files=files,
            contents={key: facts for key, facts in used.items() if len(msgspec.json.encode(facts)) <= MAX_FACTS_BYTES},
            differences=_last({**theirs.differences, **ours.differences}, KEPT_DIFFERENCES),
        )
        try:
            write_privately(self._path, msgspec.json.encode(kept))
        except OSError as error:
            _logger.warning("what is known of tokenizers cannot be kept: %s", error.strerror)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The tokenizer of one model folder. Reading raises `ModelUnavailable`, or `OSError` when the folder vanishes."""

    folder: Path
    cache: TokenizerCache

    @property
    def path(self) -> Path | None:
        """The tokenizer file in use; None when the folder has none."""
        names = ("tokenizer.json", *OPAQUE_FILES)
        return next((path for name in names if (path := self.folder / name).is_file()), None)

    @property
    def is_known(self) -> bool:
        """Whether its facts are known without reading a file."""
        path = self.path
        return path is None or self.cache.known(path) is not None

    def facts(self) -> Facts:
        """Return its facts."""
        path = self.path
        facts = self.cache.facts(path) if path is not None else Facts()
        if facts.problem:
            raise ModelUnavailable(facts.problem)
        return facts

    def longest_bytes(self) -> int:
        """Return the bytes of the longest piece that one token stands for; 0 where unknown. Raises nothing."""
        with contextlib.suppress(ModelUnavailable, OSError):
            return self.facts().longest_bytes
        return 0

    def shares_tokens(self, draft: "Tokenizer") -> bool:
        """Whether every id means the same in both."""
        ours = self.facts().tokens
        return bool(ours) and ours == draft.facts().tokens

    def misfit(self, draft: "Tokenizer", rows: int) -> str:
        """Return why a draft model with `rows` in its embedding (0: unknown) cannot draft for this one; "": it can.

        One rule for the server that pairs and the worker that loads.
        """
        if not self.shares_tokens(draft):
            return self.difference(draft)
        highest = draft.facts().highest
        return f"it has {rows} rows and none for token {highest}; {DOWNLOAD_AGAIN}" if 0 < rows <= highest else ""

    def difference(self, draft: "Tokenizer") -> str:
        """Describe the lowest id that does not mean the same in both; "" when all do."""
        ours, theirs = self.facts(), draft.facts()
        if self.shares_tokens(draft):
            return ""
        if not (ours.words and theirs.words):
            return INCOMPARABLE
        difference = self._compared(draft, f"{ours.tokens} {theirs.tokens}", _first_difference)
        return f"it has another tokenizer: {difference}; choose a draft model of the same family"

    def other_word(self, draft: "Tokenizer") -> str:
        """Describe the lowest id that stands for one piece of text here and another in `draft`; "" when there is none.

        Added tokens and ids that only one of the two has may differ.
        """
        ours, theirs = self.facts(), draft.facts()
        if not (ours.words and theirs.words) or ours.words == theirs.words:
            return ""
        return self._compared(draft, f"words {ours.words} {theirs.words}", _other_word)

    def _compared(self, draft: "Tokenizer", key: str, find: "Comparison") -> str:
        files = self.folder / "tokenizer.json", draft.folder / "tokenizer.json"
        return self.cache.difference(key, *files, find)

    def use_of(self, token: int) -> str:
        """Return `ORDINARY` for an id that stands for text, the name of a special token, "" for an unused id."""
        facts = self.facts()
        if any(begin <= token < end for begin, end in facts.ordinary):
            return ORDINARY
        return facts.special.get(token, "")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Id → piece, and the ids of the added tokens."""

    pieces: Mapping[int, str]
    added: Mapping[int, _Added]

    @property
    def words(self) -> dict[int, str]:
        return {token: piece for token, piece in self.pieces.items() if token not in self.added}


Comparison = Callable[[_Vocabulary, _Vocabulary], str]


def _first_difference(main: _Vocabulary, draft: _Vocabulary) -> str:
    """Describe the lowest id that does not mean the same in both; "" when all do."""
    return _first(main.pieces.keys() | draft.pieces.keys(), main.pieces, draft.pieces)


def _other_word(main: _Vocabulary, draft: _Vocabulary) -> str:
    ours, theirs = main.words, draft.words
    return _first(ours.keys() & theirs.keys(), ours, theirs)


def _first(ids: Iterable[int], main: Mapping[int, str], draft: Mapping[int, str]) -> str:
    for token in sorted(ids):
        if main.get(token) != draft.get(token):
            here, there = _quote(main.get(token)), _quote(draft.get(token))
            return f"token {token} is {here} in the main model and {there} in the draft"
    return ""


def _facts(name: str, digest: str, content: bytes) -> Facts:
    if name != "tokenizer.json":
        return Facts(tokens=digest)
    try:
        vocabulary = _decode(content)
    except ModelUnavailable as error:
        return Facts(problem=error.message)
    ids = sorted(vocabulary.pieces)
    special = {token: added_token.content for token, added_token in vocabulary.added.items() if added_token.special}
    return Facts(
        tokens=_digest(vocabulary.pieces, ids),
        words=_digest(vocabulary.pieces, [token for token in ids if token not in vocabulary.added]),
        ordinary=tuple(_ranges(token for token in ids if token not in special)),
        special=special,
        highest=ids[-1] if ids else -1,
        longest_bytes=max((len(piece.encode()) for piece in vocabulary.pieces.values()), default=0),
    )


def _decode(content: bytes) -> _Vocabulary:
    if content.count(b":") > MAX_PIECES or content.count(b"[") > MAX_PIECES:
        raise ModelUnavailable(f"tokenizer.json holds more than {MAX_PIECES:,} pieces; {DOWNLOAD_AGAIN}")
    try:
        decoded = msgspec.json.decode(content, type=_Content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise ModelUnavailable(f"tokenizer.json is not valid; {DOWNLOAD_AGAIN}") from None
    vocab = decoded.model.vocab
    listed = ((piece, token) for token, (piece, _) in enumerate(vocab)) if isinstance(vocab, list) else vocab.items()
    added = {added_token.id: added_token for added_token in decoded.added_tokens or ()}
    pieces = {token: piece for piece, token in listed} | {
        token: added_token.content for token, added_token in added.items()
    }
    if not all(0 <= token < HIGHEST_ID for token in pieces):
        raise ModelUnavailable(f"tokenizer.json is not valid; {DOWNLOAD_AGAIN}")
    return _Vocabulary(pieces, added)


def _digest(pieces: Mapping[int, str], ids: Sequence[int]) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(ids), LINES):
        some = ((token, pieces[token]) for token in ids[start : start + LINES])
        digest.update("".join(f"{token}:{len(piece)}:{piece}\n" for token, piece in some).encode())
    return digest.hexdigest()


def _ranges(ids: Iterable[int]) -> Iterable[tuple[int, int]]:
    for _, run in itertools.groupby(enumerate(ids), lambda place: place[1] - place[0]):
        tokens = [token for _, token in run]
        yield tokens[0], tokens[-1] + 1


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:
        return (0, -1, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _kept_in(path: Path | None) -> _Kept:
    """Read the kept file; empty when it is missing, damaged or of another version: it is made anew."""
    kept = None if path is None else read_kept(path, _Kept, MAX_KEPT_BYTES)
    return kept if kept is not None and kept.form == FORM else _Kept()


def _last(entries: Mapping[str, Value], count: int) -> dict[str, Value]:
    return dict(list(entries.items())[-count:])


def _quote(piece: str | None) -> str:
    return "unused" if piece is None else repr(piece[:40])
