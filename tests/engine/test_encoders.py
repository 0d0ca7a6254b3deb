"""Encoders of every kind equal plain NumPy: alone, in batches and with packed weights. The pool can evict them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from app.core.errors import InsufficientMemory, InvalidRequest, ModelUnavailable
from app.core.pool_events import LoadFailed
from app.core.request import Request
from app.core.step import PrefillRow, PrefillStep
from app.core.unit import ModelSpecification
from app.engine import memory
from app.engine.encoder_engine import EncoderEngine
from app.engine.loading.pool import EnginePool, open_pool
from app.models.encoders import BATCH_ROWS
from app.models.footprint import SHARED_CHUNK_TOKENS
from app.scheduler.scheduler import Scheduler
from tests.engine.pool_world import drain
from tests.shares import one_in
from tests.tiny import write_tiny_model
from tests.tiny_encoders import (
    CONTEXT_TOKENS,
    KINDS,
    LAYERS,
    VOCABULARY,
    config_of,
    embedding_of,
    weights_of,
    write_tiny_encoder,
)

CLOSE = 2e-4
POOLINGS = ("mean", "cls", "last")
LENGTHS = (1, 2, 5, 5, 17, 30, CONTEXT_TOKENS)


def texts_of(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    random = np.random.default_rng(7)
    return [tuple(int(token) for token in random.integers(4, len(VOCABULARY), length)) for length in lengths]


def opened(folder: Path, **changes: Any) -> tuple[EnginePool, EncoderEngine]:
    pool = open_pool(10**9)
    pool.acquire(ModelSpecification(id="encoder", path=str(folder), **changes))
    [*_, event] = drain(pool)
    if isinstance(event, LoadFailed):
        raise event.error
    engine = pool.engine("encoder")
    assert isinstance(engine, EncoderEngine)
    return pool, engine


def read(
    engine: EncoderEngine, texts: Sequence[Sequence[int]], poolings: Sequence[str]
) -> tuple[list[np.ndarray[Any, Any]], int]:
    """Submit all texts to a scheduler together; return their vectors and the number of steps."""
    scheduler = Scheduler(engine.limits)
    for name, (text, pooling) in enumerate(zip(texts, poolings, strict=True)):
        scheduler.submit(Request(id=str(name), prompt_tokens=tuple(text), max_tokens=1, embeds=pooling))
    embeddings: dict[str, Any] = {}
    steps = 0
    while scheduler.has_work:
        while request := scheduler.next_admission():
            scheduler.admitted(request.id, engine.admit(request))
        if plan := scheduler.plan():
            steps += 1
            for event in scheduler.commit(engine.step(plan)):
                embeddings[event.request_id] = np.array(event.embedding)
        for name, tokens in scheduler.drain_released():
            engine.release(name, tokens)
    return [embeddings[str(name)] for name in range(len(texts))], steps


def vectors(config: Mapping[str, Any], texts: Sequence[Sequence[int]], poolings: Sequence[str]) -> list[Any]:
    weights = weights_of(dict(config))
    return [embedding_of(dict(config), weights, text, pooling) for text, pooling in zip(texts, poolings, strict=True)]


@pytest.mark.parametrize("kind", one_in(2, KINDS))
def test_vectors_are_those_of_plain_numpy_whatever_is_read_beside_them(tmp_path: Path, kind: str) -> None:
    _, engine = opened(write_tiny_encoder(tmp_path / kind, kind))
    texts, poolings = texts_of(LENGTHS), [POOLINGS[place % 3] for place in range(len(LENGTHS))]
    wanted = vectors(config_of(kind), texts, poolings)
    together, _ = read(engine, texts, poolings)
    for text, pooling, truth, vector in zip(texts, poolings, wanted, together, strict=True):
        [alone], _ = read(engine, [text], [pooling])
        assert np.abs(alone - truth).max() < CLOSE
        assert np.abs(vector - alone).max() < CLOSE
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    assert min(np.abs(first - other).max() for first, other in pairwise(wanted)) > 100 * CLOSE


@pytest.mark.parametrize(("kind", "prefix"), [("bert", "bert."), ("roberta", "roberta."), ("modernbert", "model.")])
def test_a_checkpoint_that_was_saved_with_a_head_is_read(tmp_path: Path, kind: str, prefix: str) -> None:
    _, engine = opened(write_tiny_encoder(tmp_path / kind, kind, prefix=prefix))
    texts = texts_of((9,))
    [vector], _ = read(engine, texts, ["mean"])
    assert np.abs(vector - vectors(config_of(kind), texts, ["mean"])[0]).max() < CLOSE


def test_the_first_berts_names_of_a_norm_are_known(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path / "old")
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), old, metadata={"format": "pt"})
    texts = texts_of((9,))
    [vector], _ = read(opened(folder)[1], texts, ["mean"])
    assert np.abs(vector - vectors(config_of("bert"), texts, ["mean"])[0]).max() < CLOSE


def test_a_modernbert_of_transformers_5_tells_layers_and_places_in_its_own_words(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    changes = {
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 160_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "global_attn_every_n_layers": None,
        "global_rope_theta": 1.0,
        "local_rope_theta": 1.0,
    }
    texts = texts_of((20,))
    [vector], _ = read(opened(write_tiny_encoder(tmp_path / "new", "modernbert", changes=changes))[1], texts, ["mean"])
    assert np.abs(vector - vectors(config_of("modernbert"), texts, ["mean"])[0]).max() < CLOSE


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert"])
def test_packed_weights_give_the_vectors_of_what_they_unpack_to(tmp_path: Path, kind: str) -> None:
    folder = write_tiny_encoder(tmp_path / kind, kind, bits=4)
    weights = weights_of(config_of(kind))
    stored: Any = mx.load(str(folder / "model.safetensors"))
    for name in [name.removesuffix(".scales") for name in stored if name.endswith(".scales")]:
        parts = [stored[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
        weights[f"{name}.weight"] = np.array(mx.dequantize(*parts, group_size=32, bits=4), dtype=np.float64)
    texts = texts_of((3, 21, 40))
    embeddings, _ = read(opened(folder)[1], texts, POOLINGS)
    for text, pooling, vector in zip(texts, POOLINGS, embeddings, strict=True):
        assert np.abs(vector - embedding_of(config_of(kind), weights, text, pooling)).max() < CLOSE


def test_half_precision_is_read(tmp_path: Path) -> None:
    texts = texts_of((21,))
    [vector], _ = read(opened(write_tiny_encoder(tmp_path / "half", dtype=mx.float16))[1], texts, ["mean"])
    assert np.abs(vector - vectors(config_of("bert"), texts, ["mean"])[0]).max() < 0.02


def test_texts_of_one_length_are_read_together(tmp_path: Path) -> None:
    _, engine = opened(write_tiny_encoder(tmp_path / "bert"))
    _, steps = read(engine, texts_of((40,) * BATCH_ROWS), ["mean"] * BATCH_ROWS)
    assert steps <= 2 * -(-BATCH_ROWS * 40 // SHARED_CHUNK_TOKENS) + 2, "chunks, and a token that stands for an answer"


def test_a_text_fills_the_context_and_one_token_more_is_refused(tmp_path: Path) -> None:
    _, engine = opened(write_tiny_encoder(tmp_path / "roberta", "roberta"))
    assert engine.limits.max_context_tokens == CONTEXT_TOKENS
    read(engine, texts_of((CONTEXT_TOKENS,)), ["mean"])
    with pytest.raises(InvalidRequest, match=str(CONTEXT_TOKENS)):
        read(engine, texts_of((CONTEXT_TOKENS + 1,)), ["mean"])


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_long_forward_tells_after_each_layer_that_it_goes_on(tmp_path: Path, kind: str) -> None:
    """Otherwise the supervisor would take a slow encoder for a stuck kernel, and all running answers would end."""
    pool, quick = opened(write_tiny_encoder(tmp_path / kind, kind))
    unit, texts, reports = pool._entries["encoder"].unit, texts_of((9, 30)), list[str]()
    assert unit is not None
    slow = EncoderEngine(quick._encoder, unit, slow_seconds=0.0)
    slow.on_progress = lambda: reports.append("on")
    vectors, _ = read(slow, texts, ["mean"] * 2)
    assert len(reports) >= LAYERS
    assert all(np.array_equal(*pair) for pair in zip(vectors, read(quick, texts, ["mean"] * 2)[0], strict=True))


def test_a_device_without_memory_is_told_and_the_next_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = opened(write_tiny_encoder(tmp_path / "bert"))
    request = Request(id="r", prompt_tokens=(4, 5, 6), max_tokens=1, embeds="mean")
    engine.admit(request)

    def exhausted(*_: Any) -> mx.array:
        raise RuntimeError("[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum allowed")

    with monkeypatch.context() as patched:
        patched.setattr("app.engine.encoder_engine.pooled", exhausted)
        with pytest.raises(InsufficientMemory):
            engine.step(PrefillStep((PrefillRow("r", [4, 5, 6], 0, 2),)))
    read(engine, texts_of((3,)), ["mean"])


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("bert", {"hidden_size": 96}, "are missing or of another shape"),
        ("bert", {"num_attention_heads": 5}, "no multiple"),
        ("bert", {"hidden_act": "swish"}, "activation"),
        ("bert", {"intermediate_size": -1}, "intermediate_size"),
        ("bert", {"position_embedding_type": "relative_key"}, "relative"),
        ("bert", {"is_decoder": True}, "not made for embeddings"),
        ("bert", {"architectures": ["BertForSequenceClassification"]}, "not made for embeddings"),
        ("modernbert", {"rope_scaling": {"rope_type": "yarn"}}, "scaled"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(
    tmp_path: Path, kind: str, changes: dict[str, Any], reason: str
) -> None:
    folder = write_tiny_encoder(tmp_path / kind, kind, changes=changes)
    with pytest.raises(ModelUnavailable, match=reason) as refused:
        opened(folder)
    assert str(tmp_path) not in str(refused.value)


def test_every_byte_comes_back_and_the_estimate_covers_what_a_full_batch_takes(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path / "bert", dtype=mx.float16)
    texts, ways = texts_of((CONTEXT_TOKENS,) * BATCH_ROWS), ["mean"] * BATCH_ROWS
    memory.release()
    idle = mx.get_active_memory()
    for _ in range(2):
        pool, engine = opened(folder)
        footprint = memory.footprint(ModelSpecification(id="encoder", path=str(folder)))
        mx.reset_peak_memory()
        read(engine, texts, ways)
        assert 0 < pool.snapshot()[0].weights_bytes <= footprint.weights_bytes
        assert mx.get_peak_memory() - idle <= footprint.total_bytes == pool.accounted_bytes
        pool.release("encoder")
        del engine
        pool.unload("encoder")
        assert mx.get_active_memory() - idle < 256


def test_an_encoder_and_a_model_that_answers_make_way_for_one_another(tmp_path: Path) -> None:
    encoder = ModelSpecification(id="encoder", path=str(write_tiny_encoder(tmp_path / "encoder")))
    answers = ModelSpecification(
        id="qwen3", path=str(write_tiny_model(tmp_path / "qwen3", "qwen3")), max_rows=1, max_context_tokens=128
    )
    pool = open_pool(max(memory.footprint(model).total_bytes for model in (encoder, answers)) + 1)
    for wanted in (encoder, answers, encoder):
        pool.acquire(wanted)
        drain(pool)
        pool.release(wanted.id)
        assert [model.id for model in pool.snapshot()] == [wanted.id]
