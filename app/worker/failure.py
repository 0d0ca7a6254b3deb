"""An error as a frame and back: the class by its name, nothing of the traceback."""

from app.core.errors import PacelineError, error_class
from app.core.messages import Failed

_LONGEST_MESSAGE = 600


def failed_frame(request_id: str, error: PacelineError) -> Failed:
    """The terminal frame of a request that ended with `error`."""
    return Failed(
        id=request_id,
        error=type(error).__name__,
        message=_encodable(error.message),
        code=error.code,
        parameter=error.parameter,
        retry_after_seconds=error.retry_after_seconds,
    )


def error_of(failed: Failed) -> PacelineError:
    """The error that a frame names."""
    return error_class(failed.error)(
        failed.message,
        code=failed.code,
        parameter=failed.parameter,
        retry_after_seconds=failed.retry_after_seconds,
    )


def short_text(error: BaseException) -> str:
    """One line about an unexpected exception; the traceback belongs into the log."""
    first_line = next(iter(str(error).splitlines()), "")
    return _encodable(f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__)


def _encodable(text: str) -> str:
    return text[:_LONGEST_MESSAGE].encode("utf-8", "replace").decode("utf-8")
