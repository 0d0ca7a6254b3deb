"""Published drafters are matched by whole words of a model's name, never to a drafter, and only if they fit."""

from pathlib import Path

import pytest

from app.hub.hub_files import checked_repository
from app.hub.hub_search import (
    COMFORTABLE_SPEED,
    FEATURE_DRAFTERS,
    PAIRS,
    SIZES_GB,
    SMALL_MODELS,
    expected_speed,
    published_for,
    recommended,
)
from app.i18n.catalogs import read_words
from app.models.catalog import CatalogModel

GB = 1_000_000_000


def main(name: str, billions: float = 8, **more: object) -> CatalogModel:
    count = int(billions * 1e9)
    return CatalogModel(id=name, path=Path(name), source="folder", parameter_count=count, **more)  # type: ignore[arg-type]


def test_every_repository_has_a_name_that_can_be_downloaded() -> None:
    known = {name for _, _, name in (*FEATURE_DRAFTERS, *SMALL_MODELS)}
    for name in known | set(SIZES_GB) | {pair[0] for pair in PAIRS} | {name for pair in PAIRS for name, _ in pair[2]}:
        assert checked_repository(name) == name


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("mlx-community/Qwen3-4B-4bit", "z-lab/Qwen3-4B-DFlash-b16"),
        ("Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
        ("mlx-community/Qwen3-8B-8bit", "RedHatAI/Qwen3-8B-speculator.eagle3"),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
        ("mlx-community/Llama-3.1-8B-Instruct-4bit", "mlx-community/Llama-3.2-1B-Instruct-4bit"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", "z-lab/gpt-oss-20b-DFlash"),
        ("mlx-community/Qwen3-8B-4bit", "mlx-community/Qwen3-0.6B-4bit"),
    ],
)
def test_a_drafter_is_found_by_the_name_of_the_main_model(name: str, drafter: str) -> None:
    assert drafter in [offer.repository for offer in published_for(main(name))]


@pytest.mark.parametrize("name", ["Qwen3-40B-4bit", "Qwen3-4bit", "my/Mistral-7B", "Qwen3-8Bits"])
def test_part_of_a_word_is_not_a_name(name: str) -> None:
    assert [offer for offer in published_for(main(name)) if offer.method != "draft_model"] == []


def test_small_models_stay_small_and_tiny_mains_get_none() -> None:
    def small(billions: float) -> list[str]:
        offers = published_for(main("Qwen3-X", billions))
        return [offer.repository.rpartition("/")[2] for offer in offers if offer.method == "draft_model"]

    assert small(3) == []
    assert small(8) == ["Qwen3-0.6B-4bit"]
    assert small(14) == ["Qwen3-0.6B-4bit", "Qwen3-1.7B-4bit"]
    assert small(32) == ["Qwen3-0.6B-4bit", "Qwen3-1.7B-4bit", "Qwen3-4B-4bit"]


def test_a_lost_multi_token_head_is_pointed_at_and_drafters_get_nothing() -> None:
    assert "mtp" in [offer.method for offer in published_for(main("Qwen3.5-9B-4bit", model_type="qwen3_5"))]
    assert published_for(main("Qwen3-8B-DFlash", drafter="dflash")) == []


@pytest.mark.parametrize("chip", ["Apple M4", "Apple M4 Max", "AMD EPYC 9354P 32-Core Processor"])
@pytest.mark.parametrize("gigabytes", [4, 8, 12, 16, 24, 32, 64, 128])
def test_recommended_pairs_fit_with_each_drafter_and_the_largest_comfortable_one_comes_first(
    gigabytes: int, chip: str
) -> None:
    pairs = recommended(gigabytes * GB, chip)
    assert 1 <= len(pairs) <= 3
    assert len({pair.main for pair in pairs}) == len(pairs), "one card for each model, with a choice of drafters"
    for pair in pairs:
        assert all((pair.main_bytes + drafter.size_bytes) * 1.25 < gigabytes * GB for drafter in pair.drafters)
    quick = [pair.main_bytes for pair in pairs if pair.tokens_per_second >= COMFORTABLE_SPEED]
    slow = [pair.main_bytes for pair in pairs if pair.tokens_per_second < COMFORTABLE_SPEED]
    assert quick == sorted(quick, reverse=True)
    assert slow == sorted(slow)
    assert [pair.main_bytes for pair in pairs] == [*quick, *slow]


def test_the_first_recommendation_is_the_best_that_is_comfortable_on_this_chip() -> None:
    def first(chip: str) -> str:
        return recommended(48 * GB, chip)[0].main.partition("/")[2]

    assert first("Apple M4") == "Qwen3-8B-4bit", "the 14B would write ten tokens a second"
    assert first("Apple M4 Pro") == "Qwen3-14B-4bit"
    assert first("Apple M4 Max") == "Qwen3-32B-4bit"
    assert first("Apple M9 Ultra") == first("Apple M5"), "an unknown chip is no slower than the newest plain one"
    assert first("AMD EPYC 9354P 32-Core Processor") == "Qwen3-1.7B-4bit", "on a CPU the fastest"


def test_a_models_speed_is_that_of_reading_its_weights() -> None:
    assert 40 < expected_speed(int(4.6 * GB), "Apple M4 Pro") < 50
    assert 0.1 < expected_speed(int(4.6 * GB), "Intel(R) Xeon(R)") < 0.2


def test_every_main_model_is_said_to_be_good_at_something() -> None:
    words = read_words()
    assert all(words(f"downloads.good_{strength}") for _, strength, _ in PAIRS)


def test_nothing_is_recommended_to_a_computer_without_room() -> None:
    assert recommended(GB, "Apple M4") == []
