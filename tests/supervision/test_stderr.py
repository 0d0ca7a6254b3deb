"""Output that a worker writes to stderr reaches the log, last words included, whatever its bytes."""

import contextlib
import os
import sys
from pathlib import Path

import psutil
import pytest

from app.supervision.child import MAX_LINE_BYTES, Child

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def lines_of(script: str) -> list[str]:
    lines: list[str] = []
    child = await Child.spawn(
        (sys.executable, "-c", script), on_event=lambda _event: None, on_close=lambda _why: None, on_line=lines.append
    )
    await child.wait(60)
    await child.end()
    return lines


async def test_every_line_arrives_in_order_and_the_end_of_a_process_loses_none() -> None:
    script = "import os, sys; [print(n, file=sys.stderr) for n in range(500)]; sys.stderr.write('half'); os._exit(3)"
    assert await lines_of(script) == [*map(str, range(500)), "half"]


async def test_bytes_that_are_no_text_and_endless_lines_do_no_harm() -> None:
    size = 3 * MAX_LINE_BYTES
    lines = await lines_of(f"import sys; sys.stderr.buffer.write(b'\\xff\\xfe\\n' + b'x' * {size} + b'\\nend\\n')")
    assert lines[0] == "\ufffd\ufffd"
    assert lines[-1] == "end"
    assert "".join(lines[1:-1]) == "x" * size
    assert max(map(len, lines)) <= 2 * MAX_LINE_BYTES


async def test_somebody_who_holds_the_pipe_open_does_not_hold_up_the_end(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = (
        "import os, subprocess, sys; print('last words', file=sys.stderr); sys.stderr.flush();"
        f"subprocess.Popen(['/bin/cat', {str(gate)!r}], stdout=subprocess.DEVNULL, start_new_session=True);"
        "os._exit(0)"
    )
    assert await lines_of(script) == ["last words"]
    os.close(os.open(gate, os.O_WRONLY))


async def test_a_crash_leaves_no_process_of_the_worker_at_work() -> None:
    script = (
        "import os, subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'while True: pass'], stderr=subprocess.DEVNULL);"
        "print(child.pid, file=sys.stderr, flush=True); os._exit(3)"
    )
    (process_id,) = await lines_of(script)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(process_id)).wait(60)
    assert not psutil.pid_exists(int(process_id))
