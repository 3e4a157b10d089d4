"""Turns a schedule into tensors, runs the model once, and gives back the rows of logits that are needed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.engine.attention import PagedStep, shares_blocks
from worker.engine.config import EnginePlan
from worker.engine.groups import build_groups
from worker.engine.kv_pool import KVPool
from worker.engine.model import load_decoder
from worker.engine.scheduler import Chunk, Schedule
from worker.engine.sequence import Sequence

Logits = npt.NDArray[np.float32]


class ModelRunner:
    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan
        self.decoder = load_decoder(plan)
        dtype = getattr(torch, plan.dtype)
        self.pool = KVPool(plan, dtype)
        self._shared = shares_blocks(plan.spec.num_heads, plan.spec.num_kv_heads, plan.spec.head_dim, dtype)

    @torch.inference_mode()
    def prepare(self, schedule: Schedule) -> None:
        """Pages that changed hands are cleared."""
        self.pool.clear(schedule.new_pages)

    @torch.inference_mode()
    def load(self, sequence: Sequence, start: int, stop: int, source: memoryview) -> None:
        self.pool.load(self.slots(sequence, start, stop), source)

    def clear(self, sequence: Sequence, start: int, stop: int) -> None:
        """What lies there may be anything, and must be finite until it is computed."""
        if start < stop:
            self.pool.clear_slots(self.slots(sequence, start, stop))

    def slots(self, sequence: Sequence, start: int, stop: int) -> list[int]:
        size, pages = self._plan.page_size, sequence.pages
        return [pages[p // size] * size + p % size for p in range(start, stop)]

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> Logits:
        """One forward pass over `chunks` (in the order of `order_chunks`).

        Row i of the result are the logits after the i-th chunk that samples.
        """
        ids = [t for c in chunks for t in c.sequence.token_ids[c.start : c.start + c.length]]
        positions = [p for c in chunks for p in range(c.start, c.start + c.length)]
        slots = [s for c in chunks for s in self.slots(c.sequence, c.start, c.start + c.length)]
        fill = [0] * (self.decoder.kernel.padded(len(ids)) - len(ids))
        groups = build_groups(chunks, self._plan.page_size, self.pool)
        step = PagedStep(self.pool, len(slots), self.pool.rows_of(slots), groups, self._shared)
        hidden = self.decoder.forward(torch.tensor(ids + fill), torch.tensor(positions + fill), step)
        return self._logits(hidden, chunks)

    def _logits(self, hidden: Tensor, chunks: list[Chunk]) -> Logits:
        """Only for rows that sample: the head is a fifth of a small model's work."""
        ends = np.cumsum([c.length for c in chunks]) - 1
        rows = [int(end) for end, c in zip(ends, chunks, strict=True) if c.samples]
        if not rows:
            return np.empty((0, self._plan.spec.vocab_size), dtype=np.float32)
        fill = rows[:1] * (self.decoder.kernel.padded(len(rows)) - len(rows))
        logits = self.decoder.head(hidden.index_select(0, torch.tensor(rows + fill)))
        result: Logits = logits[: len(rows)].float().numpy()
        return result
