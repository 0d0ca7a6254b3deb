"""Compares verifying over latents with computing all keys and values: `python -m bench.latents`.

One layer with the heads and ranks of DeepSeek-V3 (hidden size 1,024, random float32 weights) on this machine's CPU; the
two take turns. Takes about 100 s.
"""

import statistics
import sys
import time

from app.engine.platform import prepare

prepare()

import mlx.core as mx  # noqa: E402
from mlx_lm.models import deepseek_v3  # noqa: E402

from app.engine.caches import attention  # noqa: E402
from app.engine.runner import Runner  # noqa: E402
from tests.engine.tiny_families import configuration  # noqa: E402

SHAPE = {"hidden_size": 1024, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 1}
SHAPE |= {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
WAYS = {"keys and values": 0, "latents": attention.LATENT_QUERIES}
ROUNDS = 3


def verify(runner: Runner, width: int) -> tuple[float, int, mx.array]:
    """Return seconds, peak bytes and logits of one forward, which is rolled back."""
    mx.clear_cache()
    mx.reset_peak_memory()
    held, started = mx.get_active_memory(), time.perf_counter()
    logits, forward = runner.forward(["a"], mx.arange(width)[None], [width])
    mx.eval(logits)
    runner.commit(forward, [0])
    return time.perf_counter() - started, mx.get_peak_memory() - held, logits


def main() -> int:
    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    model = deepseek_v3.Model(deepseek_v3.ModelArgs.from_dict(configuration("deepseek_v3") | SHAPE))
    mx.eval(model.parameters())
    runner = Runner(model)
    print("context  width  keys and values s, MB   latents s, MB   time   distance")
    for context, width in ((4096, 1), (4096, 4), (4096, 16), (8192, 4)):
        runner.claim("a", context + width)
        rows = mx.random.normal((1, 1, context, 512)), mx.random.normal((1, 1, context, 64))
        runner.caches.write_span("a", 0, [rows])
        seen: dict[str, list[tuple[float, int, mx.array]]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way, attention.LATENT_QUERIES in WAYS.items():
                seen[way].append(verify(runner, width))
        runner.release("a")
        seconds = {way: statistics.median(measured[0] for measured in runs) for way, runs in seen.items()}
        ratio = statistics.median(
            new[0] / old[0] for old, new in zip(seen["keys and values"], seen["latents"], strict=True)
        )
        peaks = {way: max(measured[1] for measured in runs) / 1e6 for way, runs in seen.items()}
        old, new = (runs[-1][2] for runs in seen.values())
        distance = float(mx.max(mx.abs(old - new)) / mx.max(mx.abs(old)))
        cells = "   ".join(f"{seconds[way]:8.3f} {peaks[way]:8.0f}" for way in WAYS)
        print(f"{context:7}  {width:5}  {cells}   {ratio:.3f}   {distance:.1e}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
