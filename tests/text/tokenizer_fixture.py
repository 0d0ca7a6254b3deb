"""Small real tokenizers of every kind, written as model folders: byte-level BPE, byte fallback, and neither."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHATML = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It isn't far, is it?",
    "def main():\n    return 'hello world'\n",
    "Grüße aus Köln, où est la gare? naïve café",
    "你好，世界。今天天气很好。 日本語もある。 한국어",
    "emoji 👩‍💻 🇩🇪 👍🏽 and é combining",
    "STOP stop END end </s> ###",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>"), AddedToken("<｜x｜>")])
    return tokenizer


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """Return a SentencePiece model as transformers converts it; accents, Chinese and emoji fall back to bytes."""
    letters = sorted({letter for text in CORPUS for letter in text if letter.isascii() and letter != "\n"})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += [letter for letter in letters if letter != " "] + ["\u2581t", "he", "\u2581the"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("\u2581", "t"), ("h", "e"), ("\u2581t", "he")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_pieces() -> Tokenizer:
    """Return a tokenizer whose tokens do not name their bytes: each is decoded as the text that it adds."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((piece, -1.0) for piece in _letters())], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def _letters() -> list[str]:
    return sorted({letter for text in CORPUS for letter in text if letter not in " \n"} | {"\u2581", "\u2581the", "is"})


def write_folder(folder: Path, tokenizer: Tokenizer, *, template: str | None = CHATML, **settings: Any) -> Path:
    """Write a folder that `TextModel.load` reads; `settings` go to tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if template is not None:
        known["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps({**known, **settings}))
    config = {"model_type": "qwen3", "vocab_size": tokenizer.get_vocab_size() + 8, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
