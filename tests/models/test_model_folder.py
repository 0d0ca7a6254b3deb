import contextlib
import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.errors import ModelUnavailable
from app.models.config_values import VOCABULARY_KEYS, text_number
from app.models.encoders import UNKNOWN
from app.models.folder import inspect_folder, signature_of
from app.models.safe_files import MAX_JSON_BYTES
from tests.models.folders import CONFIG, packed, safetensors, write_model
from tests.tiny_encoders import CONTEXT_TOKENS, write_tiny_encoder

LONGEST_SECONDS = 1.0
"""Longest CPU time, in seconds, that inspecting a folder may take, whatever is in it."""
SOUND = safetensors({"a": ("F16", (2, 3)), "b": ("F32", (0,)), "c": ("U8", ())})


def refused(folder: Path) -> str:
    with pytest.raises(ModelUnavailable) as caught:
        inspect_folder(folder)
    message = caught.value.message
    assert message.startswith(f'model "{folder.name}": ')
    assert "\n" not in message
    assert str(folder.parent) not in message
    return message


def test_a_sound_folder_is_described(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "small")
    (folder / "model.safetensors").write_bytes(
        safetensors({"embed.weight": ("BF16", (8, 4)), "norm.weight": ("F32", (4,))})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}<think>"}))
    model = inspect_folder(folder)
    assert model.path == folder.resolve()
    assert (model.model_type, model.drafter) == ("qwen3", "")
    assert (model.size_bytes, model.parameter_count, model.bits) == (64 + 16, 36, 16)
    assert (model.context, model.has_chat_template, model.supports_reasoning) == (4096, True, True)
    assert text_number(model.config, *VOCABULARY_KEYS) == 8
    assert model.tensors["embed.weight"].shape == (8, 4)
    assert model.tensors["embed.weight"].size_bytes == 64
    assert model.weight_files == ("model.safetensors",)


def test_quantised_weights_count_as_the_weights_they_stand_for(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "quantised", quantization={"bits": 4, "group_size": 32})
    packed_weights = {"l.weight": ("U32", (8, 8)), "l.scales": ("F16", (8, 2)), "l.biases": ("F16", (8, 2))}
    (folder / "model.safetensors").write_bytes(safetensors(packed_weights))
    model = inspect_folder(folder)
    assert (model.bits, model.parameter_count) == (4, 8 * 64)


def test_numbers_are_found_in_the_text_part_of_a_nested_config(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"vocab_size": 7, "max_position_embeddings": 99}}
    model = inspect_folder(write_model(tmp_path / "nested", config=config))
    assert (text_number(model.config, *VOCABULARY_KEYS), model.context) == (7, 99)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"model_type": "qwen3", "dflash_config": {}}, "dflash"),
        ({"architectures": ["DFlash2DraftModel"]}, "dflash"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}, "eagle3"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["Qwen3_5MTPModel"]}, "mtp"),
    ],
)
def test_feature_drafters_are_recognised_and_need_no_tokenizer(
    tmp_path: Path, config: dict[str, Any], method: str
) -> None:
    folder = write_model(tmp_path / "drafter", config=config)
    (folder / "tokenizer.json").unlink()
    assert inspect_folder(folder).drafter == method


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid"),
        (b"{", "not valid"),
        (b"[1]", "not a JSON object"),
        (b"\xff\xfe{}", "not valid"),
        (b"[" * 200_000, "not valid"),
        (b'{"a": "' + b"x" * MAX_JSON_BYTES + b'"}', "larger than 8 MiB"),
        (b'{"vocab_size": 8}', "no model_type"),
        (b'{"model_type": 3}', "no model_type"),
    ],
    ids=["empty", "cut", "list", "utf16", "deep", "huge", "untyped", "number"],
)
def test_a_bad_config_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_bytes(content)
    assert reason in refused(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {**CONFIG, "model_file": "model.py"}),
        ("config.json", {**CONFIG, "text_config": {"_attn_implementation_internal": "x/y"}}),
        ("tokenizer_config.json", {"model_file": "model.py"}),
    ],
)
def test_a_config_that_asks_to_run_code_is_refused(tmp_path: Path, file: str, content: dict[str, Any]) -> None:
    folder = write_model(tmp_path / "model")
    (folder / file).write_text(json.dumps(content))
    assert f"{file} asks to run code" in refused(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("data_config.json", b'[{"name": "pairs.jsonl.gz", "lines": 10009, "weight": 1}]'),
        ("training_config.json", b"learning_rate: 3e-4"),
        ("adapter_config.json", b""),
        ("runtime_config.json", b'"tpu"'),
        ("other_config.json", b'{"model_file": "model.py"}'),
    ],
)
@pytest.mark.parametrize("kind", ["answers", "embeds"])
def test_a_published_folder_may_carry_configs_that_nothing_reads(
    tmp_path: Path, kind: str, file: str, content: bytes
) -> None:
    folder = (
        write_model(tmp_path / kind) if kind == "answers" else write_tiny_encoder(tmp_path / kind, pooling="cls_token")
    )
    (folder / file).write_bytes(content)
    assert inspect_folder(folder).is_encoder == (kind == "embeds")


@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json"])
def test_a_config_that_is_read_holds_an_object(tmp_path: Path, file: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / file).write_text("[]")
    assert f"{file} is not a JSON object" in refused(folder)


def test_code_that_conversions_carry_along_keeps_no_model_away(tmp_path: Path) -> None:
    remote = {"auto_map": {"AutoModel": "modeling_qwen.Model"}, "trust_remote_code": True}
    folder = write_model(tmp_path / "model", **remote)
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tok.Tok", None]}}))
    for name in ("modeling_qwen.py", "tok.py", "inference/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("raise SystemExit")
    assert inspect_folder(folder).model_type == "qwen3"


def test_a_published_drafter_may_carry_code_that_nothing_opens(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "drafter", dflash_config={"mask_token_id": 3}, auto_map={"AutoModel": "dflash.DFlash"}
    )
    (folder / "dflash.py").write_text("raise SystemExit")
    assert inspect_folder(folder).drafter == "dflash"


@pytest.mark.parametrize(
    "asked",
    [
        {"num_hidden_layers": 1_000_000_000},
        {"num_hidden_layers": 1e300},
        {"num_hidden_layers": 10**400},
        {"n_layer": 4},
        {"layer_types": ["full_attention"] * 4},
        {"hybrid_override_pattern": "M" * 1_000_000},
        {"num_experts": 1_000_000},
        {"text_config": {"num_hidden_layers": 4}},
        {"num_hidden_layers": 1_000_000_000, "text_config": {"num_hidden_layers": 2}},
        {"vocab_size": 151_936},
    ],
    ids=str,
)
def test_a_config_that_asks_for_more_than_the_weights_hold_is_refused(tmp_path: Path, asked: dict[str, Any]) -> None:
    folder = write_model(tmp_path / "model")
    inspect_folder(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **asked}))
    assert "its weights hold" in refused(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "generation_config.json", "notes", "more/notes"])
def test_whatever_is_no_plain_file_is_refused_unopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "more").mkdir()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert "not a regular file" in refused(folder)
    (folder / name).unlink()
    monkeypatch.chdir(folder)  # the path of a socket has to be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        assert "not a regular file" in refused(folder)


def test_a_text_file_larger_than_anybody_reads_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 40)
    assert "tokenizer.json is larger than 128 MiB" in refused(folder)


def test_a_folder_of_very_many_files_is_refused_however_they_are_spread(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    for part in range(3):
        (folder / f"part{part}").mkdir()
        for index in range(4_000):
            (folder / f"part{part}" / str(index)).touch()
    assert "more than 10000 files" in refused(folder)


@pytest.mark.parametrize(("file", "reason"), [("config.json", "no config.json"), ("tokenizer.json", "no tokenizer")])
def test_missing_files_are_named(tmp_path: Path, file: str, reason: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / file).unlink()
    assert reason in refused(folder)


def test_a_folder_without_weights_or_no_folder_at_all(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model.gguf")
    assert "no safetensors weights" in refused(folder)
    assert "cannot be read" in refused(tmp_path / "nowhere")
    assert "not a folder" in refused(folder / "config.json")
    with pytest.raises(ModelUnavailable, match="not usable"):
        inspect_folder(Path("nul\0byte"))


def test_pipes_and_folders_in_the_place_of_weights_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "not a regular file" in refused(folder)
    (folder / "model.safetensors").rmdir()
    os.mkfifo(folder / "model.safetensors")
    assert "not a regular file" in refused(folder)
    piped = write_model(tmp_path / "piped")
    (piped / "config.json").unlink()
    os.mkfifo(piped / "config.json")
    assert "not a regular file" in refused(piped)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_an_encoder_is_told_from_a_model_that_answers(tmp_path: Path, kind: str) -> None:
    model = inspect_folder(write_tiny_encoder(tmp_path / kind, kind))
    assert (model.is_encoder, model.pooling, model.context) == (True, "", CONTEXT_TOKENS)
    assert not inspect_folder(write_model(tmp_path / "small")).is_encoder


@pytest.mark.parametrize(("flag", "pooling"), [("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last")])
def test_the_pooling_is_the_one_that_sentence_transformers_wrote(tmp_path: Path, flag: str, pooling: str) -> None:
    folder = write_tiny_encoder(tmp_path / "e", pooling=flag)
    assert inspect_folder(folder).pooling == pooling
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": flag.removesuffix("_tokens")}))
    assert inspect_folder(folder).pooling == pooling, "in the words of its version 5"
    (folder / "1_Pooling" / "config.json").unlink()
    assert inspect_folder(folder).pooling == UNKNOWN
    (folder / "modules.json").write_text("{}")
    assert inspect_folder(folder).pooling == ""


def test_a_model_that_answers_may_tell_how_it_is_pooled(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "small")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    assert inspect_folder(folder).pooling == "last"


def test_embeddings_that_would_be_others_than_the_models_are_refused(tmp_path: Path) -> None:
    dense = write_tiny_encoder(tmp_path / "dense", pooling="cls_token", modules=("Transformer", "Pooling", "Dense"))
    assert "Dense" in refused(dense)
    assert "max_tokens" in refused(write_tiny_encoder(tmp_path / "largest", pooling="max_tokens"))
    assert "none" in refused(write_tiny_encoder(tmp_path / "nothing", pooling="x"))
    assert "bidirectional" in refused(write_model(tmp_path / "other", model_type="mpnet"))
    assert "bidirectional" in refused(write_model(tmp_path / "gemma", use_bidirectional_attention=True))
    assert "relative" in refused(write_tiny_encoder(tmp_path / "places", changes={"position_embedding_type": ["x"]}))
    assert "model_type" in refused(write_model(tmp_path / "kinds", model_type=["bert"]))


def other_users_file(folder: Path) -> Path:
    """Return a file that another user owns."""
    if os.geteuid():
        return Path("/etc/passwd")
    path = folder / "other"
    path.write_text("{}")
    os.chown(path, 12345, -1)
    return path


def test_links_are_followed_to_files_of_the_same_user_and_no_others(tmp_path: Path) -> None:
    weights = write_model(tmp_path / "elsewhere") / "model.safetensors"
    folder = write_model(tmp_path / "model")
    (folder / "inside.json").symlink_to("config.json")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(weights)
    assert inspect_folder(folder).size_bytes == 64
    for name in ("b.json", "a.json", "c.json"):
        (folder / name).symlink_to(other_users_file(tmp_path))
    assert "a.json is a link to a file of another user; copy" in refused(folder), "the first by name, at every call"
    for name in ("b.json", "a.json", "c.json"):
        (folder / name).unlink()
    (folder / "loop.json").symlink_to("loop.json")
    assert "link to nothing" in refused(folder)


def test_a_folder_has_changed_where_a_link_became_the_file_itself(tmp_path: Path) -> None:
    weights = write_model(tmp_path / "elsewhere") / "model.safetensors"
    link = write_model(tmp_path / "model") / "model.safetensors"
    link.unlink()
    link.symlink_to(weights)
    before = signature_of(link.parent)
    link.unlink()
    link.hardlink_to(weights)
    assert signature_of(link.parent) != before


def test_a_snapshot_of_the_hugging_face_cache_may_link_to_its_own_blobs_only(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = write_model(repository / "snapshots" / "abc123")
    (repository / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(repository / "blobs" / "sha")
    (snapshot / "model.safetensors").symlink_to("../../blobs/sha")
    assert inspect_folder(snapshot).size_bytes == 64
    (snapshot / "extra.json").symlink_to(other_users_file(tmp_path))
    assert "another user" in refused(snapshot)


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x00\x00",
        bytes(8),
        b"\xff" * 8,
        packed(b"{}")[:-1],
        packed(b"not json"),
        packed([]),
        packed({"a": 1}) + bytes(4),
        packed({"a": entry()}) + bytes(3),
        packed({"a": entry()}) + bytes(5),
        packed({"a": entry(dtype="X9")}) + bytes(4),
        packed({"a": entry(dtype=[])}) + bytes(4),
        packed({"a": entry(shape=(-4,))}) + bytes(4),
        packed({"a": entry(shape=(-2, -2))}) + bytes(4),
        packed({"a": entry(shape=(5,))}) + bytes(4),
        packed({"a": entry(shape=(2**62, 2**62))}) + bytes(4),
        packed({"a": entry(shape=(1.5,))}) + bytes(4),
        packed({"a": entry(offsets=(4, 0))}) + bytes(4),
        packed({"a": entry(offsets=(-4, 0))}) + bytes(4),
        packed({"a": entry(offsets=(0, 4, 8))}) + bytes(4),
        packed({"a": entry(), "b": entry()}) + bytes(4),
        packed({"a": entry(), "b": entry(offsets=(2, 6))}) + bytes(6),
        packed({"a": entry(), "b": entry(offsets=(8, 12))}) + bytes(12),
        packed({"a": entry(dtype="F16")}) + bytes(4),
        packed(b'{"a":' + b"[" * 100_000) + bytes(4),
    ],
)
def test_a_broken_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors is" in refused(folder)


def test_every_shard_must_be_there_by_its_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (folder / first).write_bytes(safetensors({"a": ("F16", (8,))}))
    assert "1 weight files are missing" in refused(folder)
    (folder / second).write_bytes(safetensors({"a": ("F16", (8,))}))
    assert "repeats a tensor" in refused(folder)
    (folder / second).write_bytes(safetensors({"b": ("F16", (8,))}))
    assert inspect_folder(folder).weight_files == (first, second)


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "model-00001-of-00004.safetensors", "b": "model-00004-of-00004.safetensors"},
        {"a": "model.safetensors", "mtp.fc.weight": "mtp.safetensors"},
        {"a": "model.safetensors", "never.there": "model.safetensors"},
        {"a": 3},
    ],
    ids=["of the unpacked model", "with a head beside it", "with a tensor too many", "broken"],
)
def test_an_index_of_another_packing_hides_no_model(tmp_path: Path, weight_map: dict[str, Any]) -> None:
    """mlx-community's gemma-3-12b-it-4bit and Qwen3-VL have such an index; mlx-lm does not read it."""
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert inspect_folder(folder).weight_files == ("model.safetensors",)


def test_a_config_may_hold_infinity_as_python_writes_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"time_step_limit": [0.0, float("inf")]}
    (folder / "config.json").write_text(json.dumps(config))
    assert inspect_folder(folder).config["time_step_limit"] == [0.0, float("inf")]
    (folder / "config.json").write_text('{"a": Infinit}')
    assert "is not valid" in refused(folder)


def test_names_that_no_terminal_should_see_are_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "evil\x1b[2J\nname"
    folder.mkdir()
    with pytest.raises(ModelUnavailable) as caught:
        inspect_folder(folder)
    assert caught.value.message.isprintable()


FILES = ("config.json", "tokenizer_config.json", "model.safetensors", "model.safetensors.index.json")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(FILES),
    content=st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=200).map(packed),
        st.integers(0, len(SOUND) - 1).map(lambda end: SOUND[:end]),
        st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)).map(
            lambda change: SOUND[: change[0]] + bytes([change[1]]) + SOUND[change[0] + 1 :]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
    ),
)
def test_whatever_a_file_holds_the_gate_answers_or_refuses(name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary) / "model")
        (folder / "model.safetensors").write_bytes(SOUND)
        (folder / name).write_bytes(content)
        began = time.process_time()
        with contextlib.suppress(ModelUnavailable):
            assert inspect_folder(folder).size_bytes >= 0
        assert time.process_time() - began < LONGEST_SECONDS
