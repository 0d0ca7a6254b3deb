"""What a downloading process is told and what it tells: one JSON object a line, the job on its standard input."""

import msgspec


class DownloadJob(msgspec.Struct, frozen=True, kw_only=True):
    """One repository to fetch. The token travels here, never in arguments or environment."""

    repository: str
    revision: str = ""
    downloads_folder: str
    token: str = ""
    endpoint: str = ""
    use_xet: bool = True
    xet_from_bytes: int = 64 << 20
    """Smaller files are not worth the handshake of the chunk store."""
    reserve_bytes: int = 0
    """Room on the disk that must stay free."""
    streams: int = 3
    """Files fetched at the same time."""
    attempts: int = 5
    """Broken connections in a row, without a byte between them, that end the process."""
    retry_seconds: float = 1.0
    read_timeout_seconds: float = 30.0
    lock_seconds: float = 5.0


class Listed(msgspec.Struct, frozen=True, tag="listed"):
    """What there is to fetch is known."""

    commit: str
    total_bytes: int
    done_bytes: int


class DownloadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """More bytes are on the disk."""

    done_bytes: int


class DownloadWaiting(msgspec.Struct, frozen=True, tag="waiting"):
    """The connection broke; it is tried again in a moment."""

    problem: str


class Verifying(msgspec.Struct, frozen=True, tag="verifying"):
    """A file is whole and its hash is being computed."""

    file: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The model is in its place."""

    folder: str


class DownloadFailed(msgspec.Struct, frozen=True, tag="failed"):
    """It ended; `problem` is a code of `PROBLEMS`, with its detail behind ": "."""

    problem: str


Event = Listed | DownloadProgress | DownloadWaiting | Verifying | Done | DownloadFailed
read_event = msgspec.json.Decoder(Event).decode
read_job = msgspec.json.Decoder(DownloadJob).decode
