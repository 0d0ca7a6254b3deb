"""All drafting methods: code that lists, recognises, pairs, configures, names or runs methods uses `METHODS`.

To add a method, add an entry to `METHODS` and a `Drafter` in `app/engine/drafters/<name>.py`. If its checkpoints have
their own format, add a `DrafterConfig` to `formats.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.core.errors import ModelUnavailable
from app.models.config_values import Config
from app.models.drafters.config import DrafterConfig, Tensors, check_tensors, without_model_prefix
from app.models.drafters.formats import DFlashConfig, Eagle3Config, MtpConfig
from app.models.safe_files import printable
from app.models.tokenizer_file import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One drafting method."""

    name: str
    drafts_with: Literal["features", "model", "text"]
    """Source of drafts: a drafter reading the target's hidden states, a model with the same tokens, or earlier text."""
    words: Mapping[str, str]
    """Display names by language; English where one is missing."""
    config: type[DrafterConfig] = DrafterConfig
    """Class that reads and checks the config of its drafters."""
    keys: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Marks of its drafters' configs: one of `keys`, or the name of an architecture that contains one of `names`.
    If both are empty: the key `<name>_config`, or the name of an architecture that contains the method's."""
    at_once: bool = False
    """Whether at most one forward drafts all tokens of a step, instead of one forward for each token."""
    is_head: bool = False
    """Whether the drafter may be part of the main model's checkpoint."""
    other_names: tuple[str, ...] = ()
    """Other names of the method in vLLM's `speculative_config`."""

    def describes(self, config: Config) -> bool:
        """Return whether a folder with this config is a drafter of this method."""
        if self.drafts_with != "features":
            return False
        named = " ".join(map(str, (config.get("architectures"), config.get("speculators_model_type")))).lower()
        if not (self.keys or self.names):
            return f"{self.name}_config" in config or self.name in named
        return any(key in config for key in self.keys) or any(name in named for name in self.names)


MTP = Method(
    name="mtp",
    drafts_with="features",
    words={"en": "MTP head", "ja": "MTPヘッド", "ko": "MTP 헤드", "zh-Hans": "MTP 头"},
    config=MtpConfig,
    names=("mtp", "nextn"),
    is_head=True,
)
DRAFT_MODEL = Method(
    name="draft_model",
    drafts_with="model",
    words={"en": "Draft model", "ja": "ドラフトモデル", "ko": "드래프트 모델", "zh-Hans": "草稿模型"},
)
NGRAM = Method(
    name="ngram",
    drafts_with="text",
    at_once=True,
    words={"en": "N-grams", "ja": "N-gram", "ko": "N-그램", "zh-Hans": "N-gram"},
)
METHODS = (
    Method(name="dflash", drafts_with="features", words={"en": "DFlash"}, config=DFlashConfig, at_once=True),
    MTP,
    Method(
        name="eagle3",
        drafts_with="features",
        words={"en": "EAGLE-3"},
        config=Eagle3Config,
        keys=("draft_vocab_size",),
        names=("eagle",),
        other_names=("eagle",),
    ),
    DRAFT_MODEL,
    NGRAM,
)
"""All methods, best first: the order in which `auto` tries them where nothing was measured."""

METHOD_NAMES = tuple(method.name for method in METHODS)
FEATURE_METHODS = tuple(method.name for method in METHODS if method.drafts_with == "features")
"""Methods whose drafters read the target's hidden states."""
DRAFT_METHODS = tuple(method.name for method in METHODS if method.drafts_with != "text")
"""Methods that need a drafter on disk."""
TEXT_METHODS = tuple(method.name for method in METHODS if method.drafts_with == "text")
AT_ONCE_METHODS = tuple(method.name for method in METHODS if method.at_once)
"""Methods whose drafting cost does not depend on the draft length."""


def drafter_method(config: Config) -> str:
    """Return the method of the feature drafter that `config` describes, supported or not; "" for a standalone model."""
    ranked = sorted(METHODS, key=lambda method: method.is_head)  # heads last: their names are the least specific
    name = next((method.name for method in ranked if method.describes(config)), "")
    return name or printable(str(config.get("speculators_model_type", "")))


def read_drafter(method: str, config: Config, target_config: Config) -> DrafterConfig:
    """Read a feature drafter's config and check it against the target's. Raises ModelUnavailable."""
    if method not in FEATURE_METHODS:
        raise ModelUnavailable(f"drafters of the kind {method or 'unknown'} cannot run here; choose another one")
    return METHODS[METHOD_NAMES.index(method)].config.read(config, target_config)


def check_drafter(
    method: str, folder: Path, config: Config, tensors: Tensors, *, target: Tokenizer, target_config: Config
) -> DrafterConfig:
    """Check a feature drafter without loading it, and return its config. Raises ModelUnavailable.

    `target` is the main model's tokenizer, `tensors` are the drafter's by name. For a head inside the target's
    checkpoint, `folder` is the target's.
    """
    drafter_config, names = read_drafter(method, config, target_config), without_model_prefix(tensors)
    if any(name.endswith(".scales") for name in names):
        raise ModelUnavailable("it is quantised, which a drafter of this kind cannot be here; choose the original")
    check_tensors(drafter_config, names, target_config)
    drafter_config.check(folder, names, target)
    return drafter_config
