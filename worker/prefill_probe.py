"""What computing a prompt costs this engine: a short probe at the start, to choose between fetching KV and computing it."""

from __future__ import annotations

import time

from context_daemon.rates import PrefillCost, PrefillRate
from context_daemon.records import RequestKey, SamplingParams
from worker.engine.protocol import Engine, EngineRequest, StepOutput

PROBE_TOKENS = 128
_KEY = RequestKey("probe", 0)


def probe(engine: Engine) -> PrefillRate:
    """Prefill a short prompt, twice: the first pass warms up. The engine must be idle, and is left so."""
    seconds = [_prefill(engine, length) for length in (PROBE_TOKENS // 2, PROBE_TOKENS // 2, PROBE_TOKENS)]
    half, whole = seconds[1], seconds[2]
    token_s = max((whole - half) / (PROBE_TOKENS // 2), whole / PROBE_TOKENS / 2)
    return PrefillRate(PrefillCost(fixed_s=max(0.0, whole - token_s * PROBE_TOKENS), token_s=token_s))


def _prefill(engine: Engine, length: int) -> float:
    length = min(length, engine.capacity.max_model_len - 1)
    engine.add(EngineRequest(_KEY, (1,) * length, SamplingParams(seed=0, max_tokens=1, temperature=0.0)))
    started = time.perf_counter()
    while not engine.step().tokens:
        pass
    engine.abort(_KEY)
    return time.perf_counter() - started


def learn(rate: PrefillRate, output: StepOutput, seconds: float) -> None:
    """Take a step in that was one sequence's prefill and nothing else: only there the time is the prefill's alone."""
    if output.prefill_tokens == 0 or output.decode_tokens or len(output.kv_len) != 1:
        return
    (stop,) = output.kv_len.values()
    rate.observe(stop - output.prefill_tokens, stop, seconds)
