"""vLLM's speculative_config: the keys that are accepted; anything else is refused with one line."""

import pytest

from app.speculative_config import SpeculativeConfig


def test_the_keys_of_vllm_are_understood() -> None:
    text = '{"method": "dflash", "model": "demo-assistant-dflash", "num_speculative_tokens": 7, "target": "main"}'
    assert SpeculativeConfig.read(text) == SpeculativeConfig(
        method="dflash", model="demo-assistant-dflash", num_speculative_tokens=7, target="main"
    )
    ngram = SpeculativeConfig.read('{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}')
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (2, 5)
    assert SpeculativeConfig.read('{"method": "eagle", "model": "x"}').method == "eagle3"
    assert SpeculativeConfig.read('{"model": "x"}').method == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "give an object"),
        ("[]", "give an object"),
        ("{", "give an object"),
        ('{"method": 3}', "method"),
        ('{"method": "ngram", "speed": 9}', "speed"),
        ('{"method": "medusa"}', "use one of ngram, draft_model, eagle3, mtp, dflash"),
        ("{}", "give a method"),
        ('{"method": "ngram", "model": "x"}', "the method ngram has none"),
        ('{"method": "mtp", "num_speculative_tokens": 0}', "give 1 to 64"),
        ('{"method": "mtp", "num_speculative_tokens": 65}', "give 1 to 64"),
        ('{"method": "mtp", "prompt_lookup_min": 2}', "for the method ngram"),
        ('{"method": "ngram", "prompt_lookup_max": 33}', "give 1 to 32"),
        ('{"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}', "must not be above"),
    ],
)
def test_anything_else_is_one_line(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refusal:
        SpeculativeConfig.read(text)
    assert "\n" not in str(refusal.value)
