import pytest

from app.text.prompt.template import TextModel
from tests.text.tokenizer_fixture import byte_fallback, byte_level, word_pieces, write_folder


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """A byte-level BPE with a ChatML template."""
    folder = write_folder(tmp_path_factory.mktemp("chat"), byte_level(), eos_token="<|im_end|>")
    return TextModel.load(folder)


@pytest.fixture(scope="session")
def models(chat: TextModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextModel]:
    """One model per way of detokenizing."""
    root = tmp_path_factory.mktemp("models")
    made = {
        "fallback": write_folder(root / "fallback", byte_fallback(), eos_token="</s>", bos_token="<s>"),
        "unstripped": write_folder(root / "unstripped", byte_fallback(strip=False), eos_token="</s>"),
        "window": write_folder(root / "window", word_pieces(), eos_token="</s>", unk_token="<unk>"),
    }
    return {"bytes": chat} | {name: TextModel.load(folder) for name, folder in made.items()}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave templates of published tokenizers, which npm fetches, to `make test-all`."""
    params = getattr(item, "callspec", None)
    if params is not None and any(str(value).startswith("tokenizer ") for value in params.params.values()):
        item.add_marker(pytest.mark.system("npm"))
