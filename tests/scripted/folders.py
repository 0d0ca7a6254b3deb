"""Folders of scripted models: a chat template, a tokenizer that knows its marks, and tiny weights, all zero."""

import json
import re
import shutil
from pathlib import Path

from numpy import float16, zeros
from safetensors.numpy import save_file

import app
from tests.published import chat_templates, tokenizer_folder

DEMO = Path(app.__file__).parent / "demo_models" / "demo-assistant"
DEMO_TEMPLATE = str(json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"])
CONTEXT_TOKENS = 131_072
PLAYS = "plays.json"
"""Name of the file, next to the model folders, that maps each play's name to its text."""
WIDTH = 2
"""Hidden size of the model, which is loaded but never run."""

SPECIAL_MARKS = re.compile(
    r"<[|｜][^<>\s|｜{}]{1,40}[|｜]>|<[|][a-z_]+>|<[a-z_]+[|]>|\[/?[A-Z_]{3,}\]|<seed:[a-z]+>|\[e~\["
)
"""Marks in a template that published tokenizers have as special tokens, recognised by their spelling."""
PLAIN_MARKS = re.compile(r"</?(?:[a-z]+:)?(?:think|thinking|tool_call|tool_calls|tool_response|arg_key|arg_value)>")
"""Marks that published tokenizers have as tokens that are not special, if they have them at all."""
ENDS = (
    "<|im_end|>", "<|return|>", "<|call|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "[e~[",
    "<｜end▁of▁sentence｜>", "<|assistant_end|>", "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>", "<|end_of_msg|>",
    "<|eot|>", "<|eom|>", "<seed:eos>", "<|observation|>", "<|role_end|>", "<|message_sep|>",
)  # fmt: skip
"""Marks that end an answer, the usual one of a family first."""
FALLBACK_END = "</s>"


def template_source(name: str) -> str:
    """Return the published template with this file name; `demo`: the embedded model's."""
    return DEMO_TEMPLATE if name == "demo" else chat_templates()[name].read_text(encoding="utf-8")


def write_scripted_model(folder: Path, template: str, *, tokenizer: str = "") -> None:
    """Write a folder that serves `template`, a source, with the embedded model's tokenizer or a published one's.

    It appears complete or not at all, because a running server scans the folder around it.
    """
    unfinished = folder.with_name(f".{folder.name}")
    unfinished.mkdir(parents=True)
    source = tokenizer_folder(tokenizer) if tokenizer else DEMO
    shutil.copy(source / "tokenizer.json", unfinished)
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    pieces = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    known = {entry["content"]: entry["id"] for entry in pieces["added_tokens"]}
    rows = max(*pieces["model"]["vocab"].values(), *known.values()) + 1
    for mark, special in _marks(template).items():
        if mark not in known:
            known[mark], rows = rows, rows + 1
            pieces["added_tokens"].append(
                {"id": known[mark], "content": mark, "special": special, "normalized": False}
                | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            )
    ends = [mark for mark in ENDS if mark in template] or [FALLBACK_END]
    changed = {"chat_template": template, "eos_token": ends[0], "bos_token": "<s>", "model_max_length": CONTEXT_TOKENS}
    (unfinished / "tokenizer.json").write_text(json.dumps(pieces), encoding="utf-8")
    (unfinished / "tokenizer_config.json").write_text(json.dumps(settings | changed), encoding="utf-8")
    _write_weights(unfinished, rows, [known[mark] for mark in ends])
    unfinished.rename(folder)


def _marks(template: str) -> dict[str, bool]:
    """Each mark of a template, and whether it is special."""
    special = [*SPECIAL_MARKS.findall(template), "<s>", FALLBACK_END]
    special += [mark for mark in ENDS if mark in template]
    if "<|channel|>" in template:  # its models write one mark that is not in it
        special.append("<|constrain|>")
    return dict.fromkeys(PLAIN_MARKS.findall(template), False) | dict.fromkeys(special, True)


def _write_weights(folder: Path, rows: int, ends: list[int]) -> None:
    config = {
        "model_type": "qwen3",
        "vocab_size": rows,
        "max_position_embeddings": CONTEXT_TOKENS,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "head_dim": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": ends,
    }
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0"
    square = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    norms = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes |= {f"{layer}.{name}.weight": (WIDTH, WIDTH) for name in square}
    shapes |= {f"{layer}.{name}.weight": (WIDTH,) for name in norms}
    weights = {name: zeros(shape, float16) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
