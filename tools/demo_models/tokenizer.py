"""Train the shared byte-level BPE tokenizer and write it in Hugging Face layout."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import stdlib_text
from samples import Sample
from tasks import training_samples
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
EMPTY_THINK = "<think>\n\n</think>\n\n"
ASSISTANT_START = "<|im_start|>assistant\n"

# Qwen's pattern, in which digits stand alone, but punctuation before a digit keeps the space after it.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+ (?=\p{N})"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@lru_cache(maxsize=1)
def _template() -> Any:
    from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: PLC0415

    return _compile_jinja_template(template_text())


def template_text() -> str:
    """Return the chat template's source."""
    return Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def render(sample: Sample) -> str:
    """Render a conversation exactly as the chat template does, with an empty think block where asked."""
    text: str = _template().render(messages=sample.messages, tools=sample.tools, add_generation_prompt=False)
    if sample.empty_think:
        before, _, answer = text.rpartition(ASSISTANT_START)
        text = before + ASSISTANT_START + EMPTY_THINK + answer
    return text


def _training_text(seed: int, count: int) -> Iterator[str]:
    markers = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS + MARKER_TOKENS))
    samples = training_samples(seed)
    for _ in range(count):
        yield markers.sub("\n", render(next(samples)))
    documents = list(stdlib_text.documents())
    random.Random(seed).shuffle(documents)
    yield from documents[: count // 10]


def train_tokenizer(seed: int, count: int) -> Tokenizer:
    """Return a trained 2048-entry tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    markers = [AddedToken(token, special=False, normalized=False) for token in MARKER_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[*SPECIAL_TOKENS, *markers],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=16,
    )
    tokenizer.train_from_iterator(_training_text(seed, count), trainer=trainer)
    return _with_plain_markers(tokenizer)


def _with_plain_markers(tokenizer: Tokenizer) -> Tokenizer:
    """Mark think and tool tokens as ordinary added tokens, so that decoding keeps them."""
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in SPECIAL_TOKENS
    return Tokenizer.from_str(json.dumps(content))


def tokenizer_config() -> dict[str, Any]:
    """Return tokenizer_config.json's content."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "bos_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": template_text(),
    }


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Train the tokenizer and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=40_000)
    arguments = parser.parse_args()
    save(train_tokenizer(arguments.seed, arguments.samples), arguments.out)


if __name__ == "__main__":
    main()
