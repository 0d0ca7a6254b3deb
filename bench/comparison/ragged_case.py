"""Compares the bytes held for a long row and four short ones with the bytes that their tokens need, and measures rows
that join and leave while a long row runs. It runs the caches alone, as `caches_alone` does."""

from statistics import quantiles
from time import perf_counter

import mlx.core as mx

from app.engine.caches.lanes import reservation
from app.engine.runner import Runner
from bench.comparison.caches_alone import CHUNK_TOKENS, CachesAlone
from bench.comparison.cases import Bench, Case
from bench.comparison.measure import CaseResult, Check, Contender, Sample, paired_ratio
from bench.comparison.pairs import Sizes

LONG_TOKENS, MIDDLE_TOKENS = 8_192, 2_048
"""Lengths, in tokens, of the rows that run while others join; each of the two has its own buffers."""
SHORT_TOKENS = (64, 100, 150, 200)
ANSWERS = {"256 tokens": 256, "any length": 1 << 20}
JOINS = 50
SUMMARY = "bytes held for a row of 8,192 tokens and four short ones against those of their tokens; joining and leaving"


class SeparateRows:
    """Rows that join, are prefilled in chunks, and leave; each forward has one row."""

    def __init__(self, sizes: Sizes, answer_tokens: int) -> None:
        model = CachesAlone(layers=sizes.layers, heads=max(1, sizes.heads // 3), dimension=64)
        self._answer_tokens = answer_tokens
        self.runner = Runner(model)

    def join(self, name: str, tokens: int) -> None:
        """Join with a prompt of `tokens` tokens."""
        self.runner.claim(name, reservation(tokens, self._answer_tokens))
        self.extend(name, tokens)

    def extend(self, name: str, tokens: int) -> None:
        """Forward `tokens` more tokens in chunks."""
        for start in range(0, tokens, CHUNK_TOKENS):
            width = min(CHUNK_TOKENS, tokens - start)
            self.runner.separate_long_rows()
            output, forward = self.runner.forward([name], mx.ones((1, width), dtype=mx.int32), [width])
            mx.eval(output, *self.runner.caches.arrays())
            self.runner.commit(forward, [width])

    def join_and_leave(self, _: int) -> Sample:
        """Return the lower quartile of the milliseconds of a join and a leave, and the peak megabytes of them all."""
        seconds = []
        mx.clear_cache()
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        for _ in range(JOINS):
            started = perf_counter()
            self.join("guest", SHORT_TOKENS[0])
            self.runner.release("guest")
            seconds.append(perf_counter() - started)
        taken = mx.get_peak_memory() - held
        return Sample(quantiles(seconds, n=4)[0] * 1000, {"megabytes taken": taken / 1e6})


def bytes_ratio(sizes: Sizes, answer_tokens: int, said_tokens: int) -> float:
    """Return bytes held / bytes of the cached tokens, after every row has generated `said_tokens`."""
    rows, alone = SeparateRows(sizes, answer_tokens), SeparateRows(sizes, 0)
    alone.join("256", 256)
    token_bytes = alone.runner.caches.nbytes // 256
    lengths = {str(tokens): tokens for tokens in (LONG_TOKENS, *SHORT_TOKENS)}
    for name, tokens in lengths.items():
        rows.join(name, tokens)
        rows.extend(name, said_tokens)
    cached = sum(map(rows.runner.length, lengths))
    return rows.runner.caches.nbytes / (cached * token_bytes)


def run_ragged_memory(bench: Bench) -> CaseResult:
    """Check the bytes held, and compare joins while a row of 8k tokens runs with joins while one of 2k runs."""
    sizes = bench.workshop.sizes
    bytes_checks = [
        Check(f"bytes held / needed, answers of {name}, {said} said", bytes_ratio(sizes, most, said), 1.2, "at most")
        for name, most in ANSWERS.items()
        for said in (0, 128)
    ]
    hosts = {tokens: SeparateRows(sizes, 256) for tokens in (LONG_TOKENS, MIDDLE_TOKENS)}
    for tokens, rows in hosts.items():
        rows.join("host", tokens)
        rows.join("other guest", SHORT_TOKENS[1])
    long, short = (Contender(f"joining {tokens:,} tokens", rows.join_and_leave) for tokens, rows in hosts.items())
    series = bench.measure(long, short)
    taken = [series[contender.name].median_notes()["megabytes taken"] for contender in (long, short)]
    ratio = paired_ratio(series[long.name], series[short.name])
    checks = (
        *bytes_checks,
        Check("time of a join, 8k / 2k", ratio, 1.15, "at most"),
        Check("memory of a join, 8k / 2k", taken[0] / taken[1], 1.15, "at most"),
    )
    return CaseResult("ragged_memory", SUMMARY, "ms", tuple(series.values()), checks)


RAGGED_CASES = (Case("ragged_memory", SUMMARY, run_ragged_memory),)
