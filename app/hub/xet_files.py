"""Large files from the hub's chunk store, faster than plain HTTP where it works; from any offset on.

Only the downloading process imports this. Whatever goes wrong with it ends in `XetFailed`, and plain HTTP goes on.
"""

from collections.abc import Iterator
from typing import Any

from app.hub.hub_files import Hub
from app.hub.repository import RepositoryFile

try:
    import hf_xet  # type: ignore[import-untyped]
except ImportError:  # there are no wheels for some platforms
    hf_xet = None


class XetFailed(Exception):
    """The chunk store did not deliver."""


def xet_chunks(
    hub: Hub, repository: str, commit: str, file: RepositoryFile, offset: int, *, from_bytes: int
) -> Iterator[tuple[int, bytes]] | None:
    """The bytes of a file as (position, bytes); None where it is not in the store or this computer has no client."""
    if hf_xet is None or file.size_bytes < from_bytes:
        return None
    found, headers = hub.stored(repository, commit, file)
    return None if found is None else _stream(found, headers, file.size_bytes, offset)


def _stream(found: Any, headers: dict[str, str], size: int, offset: int) -> Iterator[tuple[int, bytes]]:
    position = offset
    try:
        group = hf_xet.XetSession().new_download_stream_group(
            token_refresh_url=found.refresh_route, token_refresh_headers=headers
        )
        for chunk in group.download_stream(hf_xet.XetFileInfo(found.file_hash, size), start=offset, end=size):
            yield position, bytes(chunk)
            position += len(chunk)
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise XetFailed(type(error).__name__) from None
