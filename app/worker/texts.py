"""Tokenizers and templates by model folder: loaded once, the least recently used forgotten."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import ModelUnavailable, PacelineError
from app.core.messages import ModelSpecification
from app.worker.failure import short_text
from app.worker.ports import TextModelPort, TextStreamPort

KEPT_FOLDERS = 4


OpenStream = Callable[[tuple[str, ...], Sequence[int]], TextStreamPort]
"""Stop strings, and the prompt tokens that the text continues (none for the answer to a chat)."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """The text side of one model folder."""

    model: TextModelPort
    open_stream: OpenStream


class Texts:
    """A folder that was replaced since (its modification time changed) is read again."""

    def __init__(self, load: Callable[[Path], ModelText], kept_folders: int = KEPT_FOLDERS) -> None:
        self._load = load
        self._kept_folders = kept_folders
        self._models: OrderedDict[tuple[str, int], ModelText] = OrderedDict()

    def get(self, model: ModelSpecification) -> ModelText:
        """The text side of `model`. Raises ModelUnavailable when its folder does not give one."""
        try:
            key = (model.path, Path(model.path).stat().st_mtime_ns)
            found = self._models.get(key) or self._load(Path(model.path))
        except PacelineError:
            raise
        except Exception as error:
            message = f"The tokenizer of {model.id} cannot be loaded: {short_text(error)}"
            raise ModelUnavailable(message) from error
        self._models[key] = found
        self._models.move_to_end(key)
        while len(self._models) > self._kept_folders:
            self._models.popitem(last=False)
        return found
