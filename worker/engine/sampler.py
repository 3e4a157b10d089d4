"""From one row of logits to one token. A pure function of the row, the parameters and (seed, choice, position).

Nothing here looks at a neighbour: each row is handled alone, in float64, with ties broken by the lower token id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from context_daemon.records import SamplingParams

Floats = npt.NDArray[np.float64]
_FIRST_CANDIDATES = 512


def sample(logits: npt.NDArray[np.float32], params: SamplingParams, choice: int, position: int) -> int:
    """`position` counts the sequence's generated tokens from 0. Greedy when the temperature is 0."""
    if params.temperature == 0:
        return int(logits.argmax())  # the first of equals
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores /= params.temperature
    ids, weights = _candidates(scores, params)
    cumulative = np.cumsum(weights)
    target = uniform(params.seed, choice, position) * cumulative[-1]
    picked = min(int(np.searchsorted(cumulative, target, side="right")), len(weights) - 1)
    return picked if ids is None else int(ids[picked])


def uniform(seed: int, choice: int, position: int) -> float:
    """One draw in [0, 1): Philox4x64 (Salmon et al., SC'11) keyed by (seed, choice), counter at the position."""
    key = np.array([seed % 2**64, choice], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    raw = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (raw >> 11) * 2.0**-53


def _candidates(scores: Floats, params: SamplingParams) -> tuple[npt.NDArray[np.int64] | None, Floats]:
    """Token ids (None: all, in order of id) and their weights, after top-k and then top-p."""
    vocab = len(scores)
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    if top_k == vocab and params.top_p >= 1.0:
        return None, np.exp(scores)
    if top_k < vocab:
        ids = _largest(scores, top_k)
        weights = np.exp(scores[ids])
        return _nucleus(ids, weights, params.top_p * float(weights.sum())) if params.top_p < 1.0 else (ids, weights)
    return _top_p(scores, params.top_p)


def _top_p(scores: Floats, top_p: float) -> tuple[npt.NDArray[np.int64], Floats]:
    """The nucleus is small as a rule: sort only as many of the largest as it takes to hold it."""
    goal = top_p * float(np.exp(scores).sum())
    count = _FIRST_CANDIDATES
    while True:
        ids = _largest(scores, min(count, len(scores)))
        weights = np.exp(scores[ids])
        if count >= len(scores) or np.cumsum(weights)[-1] >= goal:
            return _nucleus(ids, weights, goal)
        count *= 8


def _nucleus(ids: npt.NDArray[np.int64], weights: Floats, goal: float) -> tuple[npt.NDArray[np.int64], Floats]:
    """The smallest prefix that reaches `goal`, never empty."""
    keep = int(np.searchsorted(np.cumsum(weights), goal, side="left")) + 1
    return ids[:keep], weights[:keep]


def _largest(scores: Floats, count: int) -> npt.NDArray[np.int64]:
    """Ids of the `count` largest, largest first, equal scores by lower id: not left to a sort's whims."""
    if count < len(scores):
        threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
        ids = np.flatnonzero(scores >= threshold)
    else:
        ids = np.arange(len(scores))
    return ids[np.argsort(-scores[ids], kind="stable")][:count]
