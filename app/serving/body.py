"""Read and check a JSON body: size, time, encoding, nesting, numbers, and then the schema.

Stricter than JSON parsers are by default: UTF-8 without a byte-order mark, no NaN or infinity, integers of at most
64 bits, no lone surrogates, no duplicate keys. Unknown keys are ignored, as OpenAI does.
"""

import asyncio
import contextlib
import ctypes
import json
import math
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError

from app.core.errors import InvalidRequest
from app.serving.context import context_of
from app.serving.errors import Rejected, invalid_request

MAX_BODY_BYTES = 32 * 1024 * 1024
MIN_BYTES_PER_SECOND = 16 * 1024
"""What has arrived buys time at this rate: honest slow uploads pass, and a byte now and then does not."""
MAX_JSON_DEPTH = 64
THREAD_FROM_BYTES = 256 * 1024
"""Larger bodies are parsed in a thread, so that other streams are not held up."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

BodyModel = TypeVar("BodyModel", bound=BaseModel)


async def read_json(request: Request, schema: type[BodyModel], *, max_bytes: int = MAX_BODY_BYTES) -> BodyModel:
    """The body as `schema`. Raises `InvalidRequest`, or `Rejected` with 408 (too slow) or 413 (too large)."""
    raw = await _read(request, context_of(request).body_timeout_seconds, max_bytes)
    if len(raw) < THREAD_FROM_BYTES:
        return parse(raw, schema)
    return await asyncio.to_thread(parse, raw, schema)


def parse(raw: bytes | bytearray, schema: type[BodyModel]) -> BodyModel:
    """Bytes to a checked value. Raises `InvalidRequest`."""
    try:
        return schema.model_validate(parse_json(raw))
    except ValidationError as error:
        raise invalid_request(error) from None


def parse_json(raw: bytes | bytearray) -> Any:
    """Bytes to plain Python values. Raises `InvalidRequest`."""
    if not raw:
        raise InvalidRequest("The body is empty: send a JSON object.", code="invalid_json")
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
        msgspec.msgpack.encode(value)  # refuses what the worker's channel cannot carry: larger integers, surrogates
    except InvalidRequest:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"The body is not valid JSON in UTF-8: {why[:200]}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    if raw.count(b"{") + raw.count(b"[") > MAX_JSON_DEPTH:
        _check_depth(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidRequest("An object in the body names a key twice.", code="invalid_json")
    return found


def _finite(number: str) -> float:
    if not math.isfinite(found := float(number)):
        raise ValueError("a number is not finite")
    return found


def _check_depth(value: Any, levels: int = MAX_JSON_DEPTH) -> None:
    if levels == 0:
        raise InvalidRequest(f"The body is nested deeper than {MAX_JSON_DEPTH} levels.", code="invalid_json")
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            _check_depth(each, levels - 1)


async def _read(request: Request, timeout_seconds: float, max_bytes: int) -> bytearray:
    chunks = bytearray()
    try:
        async with asyncio.timeout(timeout_seconds) as deadline:
            began = asyncio.get_running_loop().time()
            async for chunk in request.stream():
                chunks += chunk
                if len(chunks) > max_bytes:
                    raise too_large(max_bytes)
                deadline.reschedule(began + timeout_seconds + len(chunks) / MIN_BYTES_PER_SECOND)
    except TimeoutError:
        raise Rejected(408, "The body did not arrive in time.", "request_timeout", close=True) from None
    return chunks


def give_memory_back() -> None:
    """From now on the memory of a large body is returned at once; glibc would keep twice the largest one for ever."""
    with contextlib.suppress(AttributeError):  # nobody else has it
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(option, 1 << 20)  # what asyncio reads at a time stays: it takes 256 KiB for that


def too_large(max_bytes: int = MAX_BODY_BYTES) -> Rejected:
    """The refusal of a body over the cap."""
    limit = max_bytes // 1024 // 1024
    return Rejected(413, f"The body is larger than {limit} MiB.", "request_too_large", close=True)
