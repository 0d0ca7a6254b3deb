"""Model folders are data: with code planted wherever a library could run it, the model answers and no code runs."""

import asyncio
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from app.core.messages import Generate
from app.core.unit import DrafterSpecification, ModelSpecification
from app.models.catalog import FolderCatalog
from app.models.pairing import refusal
from tests.tiny import CHAT_TEMPLATE, write_tiny_model
from tests.worker.serving import collect
from tests.worker.test_process import GREEDY, text_of, working

MODULES = (
    "modeling_planted.py",
    "configuration_planted.py",
    "tokenization_planted.py",
    "tokenization_planted_fast.py",
    "processing_planted.py",
    "image_processing_planted.py",
    "generation_planted.py",
    "custom_generate/generate.py",
    "model.py",
    "tokenizer.py",
    "__init__.py",
    "conftest.py",
    "setup.py",
    "sitecustomize.py",
    "usercustomize.py",
    "json.py",
    "mlx/__init__.py",
    "mlx_lm/models/qwen3.py",
)
PICKLES = ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.pkl", "weights.npz", "model.ckpt")
AUTO_MAP = {
    "AutoConfig": "configuration_planted.Planted",
    "AutoModel": "modeling_planted.Planted",
    "AutoModelForCausalLM": "modeling_planted.Planted",
    "AutoTokenizer": ["tokenization_planted.Planted", "tokenization_planted_fast.Planted"],
    "AutoProcessor": "processing_planted.Planted",
    "AutoImageProcessor": "image_processing_planted.Planted",
}
REMOTE: dict[str, Any] = {"auto_map": AUTO_MAP, "trust_remote_code": True, "custom_generate": "custom_generate"}


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def plant(folder: Path, ran: Path) -> Path:
    for name in MODULES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"open({str(ran)!r}, 'a').write({name!r} + chr(10))\n")
    (folder / "planted.pth").write_text(f"import os; os.system('echo pth >> {ran}')\n")
    for name in PICKLES:
        (folder / name).write_bytes(pickle.dumps(Bomb(f"echo {name} >> {ran}")))
    escape = "{{ cycler.__init__.__globals__.os.system('echo template >> " + str(ran) + "') }}"
    edit(folder / "config.json", REMOTE)
    edit(
        folder / "tokenizer_config.json",
        {**REMOTE, "tokenizer_class": "PlantedTokenizer", "processor_class": "PlantedProcessor"},
    )
    for name in ("generation_config.json", "processor_config.json", "preprocessor_config.json"):
        (folder / name).write_text(json.dumps({**REMOTE, "processor_class": "PlantedProcessor"}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "additional_chat_templates" / "planted.jinja").write_text(escape)
    return folder


def edit(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_nothing_in_a_folder_runs_while_its_model_is_listed_paired_loaded_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, models = tmp_path / "ran.txt", tmp_path / "models"
    clean = write_tiny_model(tmp_path / "clean", "qwen3")
    for name in ("main", "draft"):
        plant(write_tiny_model(models / name, "qwen3"), ran)
    monkeypatch.chdir(models / "main")  # where `paceline serve` may well be started
    listed = {model.id: model for model in FolderCatalog([models]).models()}
    assert [model.problem for model in listed.values()] == ["", ""]
    assert refusal(listed["main"], listed["draft"]) == ""

    async def scenario() -> list[str]:
        texts = []
        async with working() as client:
            for folder in (clean, models / "main"):
                drafts = (DrafterSpecification("draft", str(models / "draft")),) if folder != clean else ()
                model = ModelSpecification(id=folder.name, path=str(folder), drafters=drafts)
                messages = [{"role": "user", "content": "hello"}]
                command = Generate(id=folder.name, model=model, messages=messages, max_tokens=12, sampling=GREEDY)
                texts.append(text_of(await collect(client, command)))
        return texts

    without, planted = asyncio.run(scenario())
    assert planted == without != ""
    assert not ran.exists(), ran.read_text()


def test_a_model_file_is_refused_and_never_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran.txt"
    folder = plant(write_tiny_model(tmp_path / "models" / "main", "qwen3"), ran)
    edit(folder / "config.json", {"model_file": "model.py"})
    problem = FolderCatalog([tmp_path / "models"]).find("main").problem
    assert problem.startswith('model "main": config.json asks to run code ("model_file")')
    assert not ran.exists()
