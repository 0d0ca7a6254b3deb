"""The tokens of a tokenizer, read from its files without a tokenizer library: which id stands for which piece.

Two models may draft for one another when every id means the same in both. Sizes prove nothing: embeddings are padded
differently within one family (151,936 and 152,064 rows for the same Qwen 2.5 tokens).
"""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.core.errors import ModelUnavailable
from app.core.safe_files import DOWNLOAD_AGAIN, read_object

MAX_TOKENIZER_BYTES = 128 * 1024 * 1024
OPAQUE_FILES = ("tokenizer.model", "vocab.json", "tekken.json")
"""Compared byte by byte when there is no `tokenizer.json`."""
Stamp = tuple[tuple[int, int], ...]


def read_tokens(folder: Path) -> dict[int, str]:
    """Id → piece of `tokenizer.json`, added and special tokens included. Raises `ModelUnavailable`."""
    content = read_object(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
    try:
        tokens = _vocabulary(content["model"]["vocab"])
        tokens.update({int(token["id"]): str(token["content"]) for token in content.get("added_tokens") or ()})
    except (KeyError, TypeError, ValueError, IndexError):
        raise ModelUnavailable(f"tokenizer.json is not valid; {DOWNLOAD_AGAIN}") from None
    return tokens


def tokenizer_stamp(folder: Path) -> Stamp:
    """Sizes and times of the tokenizer's files: another value when any of them changed."""
    found = [(folder / name).stat() for name in ("tokenizer.json", *OPAQUE_FILES) if (folder / name).is_file()]
    return tuple((status.st_size, status.st_mtime_ns) for status in found)


def fingerprint(folder: Path) -> str:
    """A digest that is equal for equal tokens; "" without any tokenizer file. Raises `ModelUnavailable`."""
    for name in ("tokenizer.json", *OPAQUE_FILES):
        path = folder / name
        if path.is_file():
            status = path.stat()
            return _fingerprint(path, status.st_size, status.st_mtime_ns)
    return ""


def first_difference(main: Mapping[int, str], draft: Mapping[int, str]) -> str:
    """The lowest id that does not mean the same in both, in words; "" when all do."""
    for token in sorted(main.keys() | draft.keys()):
        if main.get(token) != draft.get(token):
            here, there = _quote(main.get(token)), _quote(draft.get(token))
            return f"token {token} is {here} in the main model and {there} in the draft"
    return ""


def other_word(main: Path, draft: Path) -> str:
    """The lowest id that stands for one piece of text in `main` and for another in `draft`, in words; "" when none.

    Added tokens and ids that only one of them knows are free. Raises `ModelUnavailable`.
    """
    stamps = []
    for folder in (main, draft):
        status = (folder / "tokenizer.json").stat()
        stamps.append((folder, status.st_size, status.st_mtime_ns))
    return _other_word(*stamps)


@functools.lru_cache(maxsize=1024)
def _other_word(main: tuple[Path, int, int], draft: tuple[Path, int, int]) -> str:
    ours, theirs = _words(main[0]), _words(draft[0])
    shared = ours.keys() & theirs.keys()
    return first_difference({token: ours[token] for token in shared}, {token: theirs[token] for token in shared})


@functools.lru_cache(maxsize=1024)
def _fingerprint(path: Path, size: int, modified: int) -> str:  # noqa: ARG001 - part of the key
    if path.name != "tokenizer.json":
        with path.open("rb") as file:
            return f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    digest = hashlib.sha256()
    for token, piece in sorted(read_tokens(path.parent).items()):
        digest.update(f"{token}:{len(piece)}:{piece}\n".encode("utf-8", "surrogatepass"))
    return f"tokens:{digest.hexdigest()}"


def _words(folder: Path) -> dict[int, str]:
    """Id → piece without the added tokens. Raises `ModelUnavailable`."""
    content = read_object(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
    try:
        added = {int(token["id"]) for token in content.get("added_tokens") or ()}
        return {token: piece for token, piece in _vocabulary(content["model"]["vocab"]).items() if token not in added}
    except (KeyError, TypeError, ValueError, IndexError):
        raise ModelUnavailable(f"tokenizer.json is not valid; {DOWNLOAD_AGAIN}") from None


def _vocabulary(vocab: Any) -> dict[int, str]:
    """BPE and WordPiece map pieces to ids; Unigram lists (piece, score) in the order of the ids."""
    if isinstance(vocab, dict):
        return {int(token): piece for piece, token in vocab.items()}
    return {token: str(entry[0]) for token, entry in enumerate(vocab)}


def _quote(piece: str | None) -> str:
    return "unused" if piece is None else repr(piece[:40])
