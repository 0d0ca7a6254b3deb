"""What is known of published drafters: by whole words of the name, never for a drafter, never more than fits."""

from pathlib import Path

import pytest

from app.hub.hub_files import checked_repository
from app.hub.hub_search import FEATURE_DRAFTERS, PAIRS, SIZES_GB, SMALL_MODELS, published_for, recommended
from app.models.catalog import CatalogModel

GB = 1_000_000_000


def main(name: str, billions: float = 8, **more: object) -> CatalogModel:
    count = int(billions * 1e9)
    return CatalogModel(id=name, path=Path(name), source="folder", parameter_count=count, **more)  # type: ignore[arg-type]


def test_every_repository_has_a_name_that_can_be_downloaded() -> None:
    known = {name for _, _, name in (*FEATURE_DRAFTERS, *SMALL_MODELS)}
    for name in known | set(SIZES_GB) | {repository for pair in PAIRS for repository in pair[:2] if repository}:
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


@pytest.mark.parametrize("gigabytes", [4, 8, 12, 16, 24, 32, 64, 128])
def test_recommended_pairs_fit_and_the_largest_comes_first(gigabytes: int) -> None:
    pairs = recommended(gigabytes * GB)
    needs = [pair.needed_bytes for pair in pairs]
    assert needs == sorted(needs, reverse=True)
    assert all(need <= gigabytes * GB for need in needs)
    assert 1 <= len(pairs) <= 3


def test_nothing_is_recommended_to_a_computer_without_room() -> None:
    assert recommended(GB) == []
