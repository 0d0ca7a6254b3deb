"""Measures the cost of a grammar's masks with Qwen3's published tokenizer: `python -m bench.mask_cost`.

CPU time of the host for every mask of one JSON answer, by number of slots, against a decode step of a model of
Qwen3-0.6B's shape (random weights, float32). Both are CPU time, so that a busy machine distorts neither.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache

from app.core.messages import Generate
from app.core.request import Grammar, Request, SamplingParameters
from app.core.step import DecodeRow
from app.core.unit import ModelSpecification
from app.engine.constraints import Constraints
from app.engine.sampling.drawing import SampledRow
from app.text.dialect import NO_DIALECT
from app.text.grammar.constraint import AnswerConstraint, Vocabulary
from app.text.grammar.request_grammar import answer_grammar
from app.text.prompt.template import TextModel
from tests.published import tokenizer_folder
from tests.tiny import tiny_config

VOCABULARY_SIZE = 151_936
SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
SHAPE |= {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
ANSWER = {"first_name": "Zoë Müller of Köln", "tags": ["one two three", "a, b", "☺ person"], "kind": "beta"}
FIELDS = {"first_name": {"type": "string", "maxLength": 40}, "tags": {"type": "array", "items": {"type": "string"}}}
SCHEMA = {"type": "object", "properties": FIELDS | {"kind": {"enum": ["alpha", "beta"]}}, "additionalProperties": False}
BOUND = 0.03


def text_model(folder: Path) -> TextModel:
    for file in tokenizer_folder("qwen3").iterdir():
        (folder / file.name).symlink_to(file)
    config = {"model_type": "qwen3", "max_position_embeddings": 8192, "vocab_size": VOCABULARY_SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    return TextModel.load(folder)


def mask_seconds(text: TextModel, slots: int) -> list[float]:
    """Return the seconds for the masks at each place in the answer, with the next `slots` - 1 tokens as drafts."""
    wish = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    asked = Generate(id="", model=ModelSpecification(id="", path=""), text="x", grammar=wish)
    vocabulary = Vocabulary(text.table)
    grammar = answer_grammar(asked, NO_DIALECT)
    enforced = vocabulary.compile_grammar(grammar.text) if grammar else None
    tokens = text.encode(json.dumps(ANSWER, ensure_ascii=False))
    constraints, spent = Constraints(), []
    held = AnswerConstraint(vocabulary, enforced, None)
    constraints.admit(Request(id="a", prompt_tokens=(0,), max_tokens=99, constraint=held))
    logits = mx.zeros((1, slots, VOCABULARY_SIZE))
    for place in range(len(tokens) - slots):
        row = DecodeRow("a", [0, *tokens[:place]], 1, place, 99, method="off", num_draft_tokens=slots - 1)
        sampled = SampledRow(SamplingParameters(), row.tokens, 1)
        drafts = mx.array([tokens[place : place + slots - 1]], dtype=mx.int32)
        began = time.thread_time()
        constraints.mask(logits, [row], [sampled], drafts, (slots - 1,))
        spent.append(time.thread_time() - began)
    return spent


def step_seconds() -> float:
    config = tiny_config("qwen3", vocabulary_size=VOCABULARY_SIZE) | SHAPE
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    cache, spent = make_prompt_cache(model), []
    for token in range(8):
        began = time.process_time()
        mx.eval(model(mx.array([[token]]), cache=cache))
        spent.append(time.process_time() - began)
    return statistics.median(spent)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = text_model(Path(folder))
        masks = {slots: mask_seconds(text, slots) for slots in (1, 4)}
    step, worst = step_seconds(), 0.0
    for slots, spent in masks.items():
        mean = statistics.mean(spent)
        worst = max(worst, mean / step)
        figures = (
            f"mean {1000 * mean:.2f} ms, median {1000 * statistics.median(spent):.2f} ms, worst {1000 * max(spent):.2f}"
        )
        print(f"{slots} slots: {figures} ms; {mean / step:.2%} of a step of {1000 * step:.0f} ms")
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
