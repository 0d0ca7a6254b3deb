"""Measures what depends on the Mac: `make mac-check MODEL=/path/to/a/model` prints a table and writes a JSON file.

It needs no root access and takes at most 40 minutes. A step that cannot run says why. The user's own server is not
touched: everything happens in a temporary home. Attach the JSON file when you report a bug or a speed.
"""

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import typer
from rich.console import Console
from rich.table import Table

from app.command.doctor import accelerator_finding
from app.machine.host import chip_name
from app.models.footprint import FUSED_SIZES

SETTINGS = ("net.local.stream.sendspace", "net.local.stream.recvspace", "iogpu.rsrc_limit", "iogpu.wired_limit_mb")
HEADS, QUERIES, CONTEXT_TOKENS = 8, 64, 8_192
"""Numbers of heads, queries and keys in the attention whose memory is measured."""
CHAIN = 500
"""Number of operations in a chain; each waits for the result of the one before."""
STEP_SECONDS = 600.0
"""Longest time, in seconds, that one command of a step may take."""
QUESTION = "Count from 1 to 20."
DEMO = "demo-assistant"


@dataclass(frozen=True)
class Fact:
    """One line of the table."""

    step: str
    what: str
    value: str


@dataclass(frozen=True)
class Context:
    """Context of all steps: the model's folder, and a temporary home."""

    model: str
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a server that shares nothing with the user's own."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
        folders = {"PACELINE_MODEL_DIRS": str(Path(self.model).parent)} if self.model else {}
        return own | folders | {"PACELINE_HOME": str(self.home), "PACELINE_PORT": "0", "PACELINE_OPEN": "0"}

    @property
    def name(self) -> str:
        """Name of the model that is loaded."""
        return Path(self.model).name if self.model else DEMO


class Skipped(Exception):
    """The step cannot run here; the message says why."""


Step = Callable[[Context], Iterator[tuple[str, str]]]


def output(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Return what a command prints. Raises Skipped where it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        raise Skipped(f"there is no {command[0]} here")
    try:
        completed = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=STEP_SECONDS, check=True
        )
    except subprocess.CalledProcessError as error:
        raise Skipped(f"`{' '.join(command)}` failed: {(error.stderr or error.stdout).strip()[-300:]}") from None
    except subprocess.TimeoutExpired:
        raise Skipped(f"`{' '.join(command)}` took more than {STEP_SECONDS:.0f} s") from None
    return completed.stdout.strip()


def paceline(context: Context, *words: str) -> str:
    """Return what a command of Paceline prints, in the temporary home."""
    return output(sys.executable, "-m", "app.cli", *words, environment=context.environment)


# --- steps --------------------------------------------------------------------------------------------------------


def describe_machine(_context: Context) -> Iterator[tuple[str, str]]:
    """Yield chip, system, Python, make, and the kernel's settings that matter."""
    yield "chip", chip_name()
    yield "system", f"{platform.platform()} {platform.machine()}"
    yield "python", f"{platform.python_version()} {sys.executable}"
    yield "make", output("make", "--version").splitlines()[0]
    for name in SETTINGS if platform.system() == "Darwin" else ():
        yield name, output("sysctl", "-n", name)


def check_wheel(_context: Context) -> Iterator[tuple[str, str]]:
    """Yield whether the mlx wheel matches this chip, and its speed of multiplication."""
    for name in ("mlx", "mlx-metal", "mlx-lm"):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"
    if platform.system() == "Darwin":
        wheel = metadata.distribution("mlx-metal").read_text("WHEEL") or ""
        finding = accelerator_finding(chip_name(), output("sw_vers", "-productVersion"), wheel)
        yield "wheel", " ".join(re.findall(r"Tag: (\S+)", wheel))
        yield "accelerators", finding.message if finding else "none on this chip"
    size = 4096 if mx.metal.is_available() else 512
    left, right = (mx.random.normal((size, size)).astype(mx.bfloat16) for _ in range(2))
    seconds = fastest(lambda: left @ right)
    yield f"bfloat16 product of {size} × {size}", f"{2 * size**3 / seconds / 1e12:.2f} TFLOP/s"


def time_operations(_context: Context) -> Iterator[tuple[str, str]]:
    """Yield the time of an operation that waits for the result of the one before."""

    def chain() -> Any:
        value = mx.ones((1,))
        for _ in range(CHAIN):
            value = value + 1
        return value

    yield "dependent operation", f"{1e6 * fastest(chain) / CHAIN:.1f} µs"


def measure_attention(_context: Context) -> Iterator[tuple[str, str]]:
    """Yield, for each head size, whether attention stores a score for each pair of query and key."""
    scores = HEADS * QUERIES * CONTEXT_TOKENS * 2
    for size in (64, 80, 96, 128, 192, 256, 512):
        shapes = ((1, HEADS, QUERIES, size), *[(1, 1, CONTEXT_TOKENS, size)] * 2)
        queries, keys, values = (mx.random.normal(shape).astype(mx.float16) for shape in shapes)
        mx.eval(queries, keys, values)
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask="causal"))
        is_stored = mx.get_peak_memory() - held > scores / 2
        expected = size not in FUSED_SIZES or not mx.metal.is_available()
        surprise = "" if is_stored == expected else "; Paceline counts on the opposite"
        yield f"heads of {size}", ("stores scores" if is_stored else "fused") + surprise


def live(context: Context) -> Iterator[tuple[str, str]]:
    """Yield the times to start, load and answer; on macOS also the wired memory. Then stop the server."""
    started = time.monotonic()
    paceline(context, "start")
    try:
        yield "start", f"{time.monotonic() - started:.1f} s"
        started = time.monotonic()
        paceline(context, "load", context.name)
        yield f"load of {context.name}", f"{time.monotonic() - started:.1f} s"
        for round_name in ("first answer", "second answer"):
            started = time.monotonic()
            reply = paceline(context, "chat", context.name, "--once", QUESTION, "--temperature", "0")
            yield round_name, f"{time.monotonic() - started:.1f} s, {len(reply)} characters"
        if platform.system() == "Darwin":
            wired = re.search(r"Pages wired down:\s+(\d+)", output("vm_stat"))
            yield "wired", f"{int(wired[1]) * resource.getpagesize() / 1e9:.2f} GB" if wired else "unknown"
            yield (
                "assertions",
                " ".join(re.findall(r"PreventUserIdleSystemSleep\s+(\d)", output("pmset", "-g", "assertions"))),
            )
    finally:
        paceline(context, "stop")


def install_service(context: Context) -> Iterator[tuple[str, str]]:
    """Install the service five times in a row, as updates do; yield the time of each."""
    for number in range(5):
        started = time.monotonic()
        paceline(context, "service", "install")
        yield f"service install {number + 1}", f"{time.monotonic() - started:.1f} s"
    yield "service uninstall", paceline(context, "service", "uninstall").splitlines()[0]


def run_bench(context: Context) -> Iterator[tuple[str, str]]:
    """Yield the checks of some cases of `make bench` in quick mode, against mlx-lm in the same run."""
    file = context.home / "bench.json"
    cases = [
        word
        for name in ("plain_1", "plain_4", "attention_pair", "ngram", "sampling_top_p")
        for word in ("--case", name)
    ]
    output(sys.executable, "-m", "bench.comparison", "--quick", "--rounds", "3", "--json", str(file), *cases)
    for case in json.loads(file.read_text(encoding="utf-8"))["cases"]:
        for check in case["checks"]:
            yield f"{case['name']}: {check['label']}", f"{check['value']:.2f}"


STEPS: Mapping[str, Step] = {
    "machine": describe_machine,
    "wheel": check_wheel,
    "operations": time_operations,
    "attention": measure_attention,
    "life": live,
    "service": install_service,
    "bench": run_bench,
}


def fastest(work: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of several runs."""
    mx.eval(work())
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        mx.eval(work())
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def run(model: str, names: list[str]) -> list[Fact]:
    """Return the facts of the named steps, in their order; a step that cannot run yields one fact, which says why."""
    facts = []
    with tempfile.TemporaryDirectory() as folder:
        context = Context(model, Path(folder))
        for name in names:
            try:
                facts += [Fact(name, what, value) for what, value in STEPS[name](context)]
            except Skipped as reason:
                facts.append(Fact(name, "skipped", str(reason)))
    return facts


def main(
    model: Annotated[str, typer.Option(help="Folder of a model; a demo model if left out.")] = "",
    step: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(STEPS)}.")] = None,
    json_file: Annotated[Path, typer.Option("--json", help="File to write.")] = Path("mac-check.json"),
) -> None:
    """Measure what depends on this computer, and write it to a file."""
    unknown = [name for name in step or () if name not in STEPS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is no step: {', '.join(STEPS)}")
    facts = run(model, step or [*STEPS])
    table = Table(box=None, pad_edge=False, show_header=False)
    for fact in facts:
        table.add_row(fact.step, fact.what, fact.value)
    Console().print(table)
    json_file.write_text(json.dumps([asdict(fact) for fact in facts], indent=1) + "\n", encoding="utf-8")
    Console().print(f"Written to {json_file}.", highlight=False)


if __name__ == "__main__":
    typer.run(main)
