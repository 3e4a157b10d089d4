"""TorchEngine: the Engine protocol on torch. Schedule, run, sample, note what happened."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil
import torch

from context_daemon.records import KVLayout, RequestKey
from worker.engine import admission, numerics
from worker.engine.attention import BLOCK, REVISION
from worker.engine.config import EngineConfig, EnginePlan, plan_engine
from worker.engine.groups import order_chunks
from worker.engine.protocol import Capacity, EngineFault, EngineRequest, NewToken, ResumeState, SlotSpan, StepOutput
from worker.engine.runner import Logits, ModelRunner
from worker.engine.sampler import sample
from worker.engine.scheduler import Chunk, Schedule, Scheduler
from worker.engine.sequence import Sequence, SequenceState, new_sequence


class TorchEngine:
    """One thread calls it. After an EngineFault it must not be used again.

    Batch-invariant mode (the default, float32): the logits of a sequence's position are bit-equal whatever runs beside
    it, however its prefill was cut, whether a position was computed by prefill or decode, and whether KV was restored
    or computed again. It holds among engines of one `numerics_class`.
    """

    def __init__(self, plan: EnginePlan, runner: ModelRunner, layout: KVLayout) -> None:
        self._plan = plan
        self._runner = runner
        self._layout = layout
        self._scheduler = Scheduler(plan.max_num_seqs, plan.max_num_batched_tokens, plan.page_size, plan.num_pages)
        self._sequences: dict[RequestKey, Sequence] = {}
        self._arrivals = 0

    @classmethod
    def load(cls, config: EngineConfig) -> TorchEngine:
        """Raises ModelFolderError or EngineConfigError before weights are read if this cannot work."""
        plan = plan_engine(config, psutil.virtual_memory().available)
        if plan.num_threads is not None:
            torch.set_num_threads(plan.num_threads)
        runner = ModelRunner(plan)
        kernels = f"{runner.decoder.kernel.name}-attn{BLOCK}-forward{REVISION}"
        layout = KVLayout(
            model_fingerprint=numerics.model_fingerprint(Path(plan.spec.path), plan.spec.weight_files),
            numerics_class=numerics.numerics_class(plan, torch.get_num_threads(), kernels),
            dtype=plan.dtype,
            num_layers=plan.spec.num_layers,
            num_kv_heads=plan.spec.num_kv_heads,
            head_dim=plan.spec.head_dim,
            page_size=plan.page_size,
        )
        return cls(plan, runner, layout)

    @property
    def plan(self) -> EnginePlan:
        return self._plan

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that one decode step must read; for measurements."""
        return self._runner.decoder.step_bytes

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def capacity(self) -> Capacity:
        return Capacity(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            max_num_seqs=self._plan.max_num_seqs,
            max_num_batched_tokens=self._plan.max_num_batched_tokens,
            pages_used=self._scheduler.allocator.used_count,
            pages_total=self._plan.num_pages,
            max_model_len=self._plan.max_model_len,
        )

    def add(self, request: EngineRequest, resume: ResumeState | None = None) -> None:
        if request.key in self._sequences:
            raise ValueError(f"{request.key} is in the engine already: abort it first")
        admission.check(request, resume, self._plan)
        eos = self._plan.spec.eos_token_ids
        sequence = new_sequence(request, resume, self._arrivals, eos, self._plan.max_model_len)
        self._arrivals += 1
        self._sequences[request.key] = sequence
        self._scheduler.add(sequence)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def step(self) -> StepOutput:
        chunks: list[Chunk] = []
        try:
            schedule = self._scheduler.schedule()
            chunks = order_chunks(schedule.chunks)
            self._runner.prepare(schedule)
            tokens = self._sample(chunks, self._runner.run(chunks)) if chunks else {}
            return self._advance(schedule, chunks, tokens)
        except Exception as error:
            suspects = tuple(chunk.sequence.key for chunk in chunks)
            raise EngineFault(f"a step over {len(chunks)} sequences failed: {error!r}", suspects) from error

    def export_slots(self, ranges: Iterable[SlotSpan], out: memoryview) -> None:
        slots: list[int] = []
        for key, start, stop in ranges:
            sequence = self._sequences[key]
            if not 0 <= start <= stop <= sequence.kv_len:
                raise ValueError(
                    f"{key}: positions [{start}, {stop}) are not resident, KV covers [0, {sequence.kv_len})"
                )
            slots += self._runner.slots(sequence, start, stop)
        if out.nbytes != len(slots) * self._layout.slot_bytes:
            raise ValueError(
                f"{len(slots)} slots are {len(slots) * self._layout.slot_bytes} bytes, the buffer has {out.nbytes}"
            )
        if slots:
            self._runner.pool.export(slots, out)

    def import_slots(self, key: RequestKey, start: int, stop: int, source: memoryview) -> bool:
        sequence = self._sequences[key]
        incoming = sequence.incoming
        if incoming is None or incoming.ended or start != incoming.next or not start < stop <= incoming.stop:
            waits = f"[{incoming.next}, {incoming.stop})" if incoming and not incoming.ended else "none"
            raise ValueError(f"{key}: positions [{start}, {stop}) come, it waits for {waits}")
        row, rest = divmod(source.nbytes, stop - start)
        if rest or row < self._layout.slot_bytes:
            raise ValueError(f"{key}: {source.nbytes} bytes are not {stop - start} rows of {self._layout.slot_bytes}")
        if sequence.state is not SequenceState.RUNNING:
            return False
        self._runner.load(sequence, start, stop, source)
        incoming.next = stop
        return True

    def end_import(self, key: RequestKey, reached: int) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None and sequence.incoming is not None:
            if sequence.state is SequenceState.RUNNING:
                self._runner.clear(sequence, max(reached, sequence.incoming.start), sequence.incoming.stop)
            sequence.end_import(reached)

    def abort(self, key: RequestKey) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def recomputed_tokens(self, key: RequestKey) -> int:
        return self._sequences[key].recomputed

    def check(self) -> None:
        """Integrity of the page accounting; raises PageAccountingError."""
        self._scheduler.check()

    def _sample(self, chunks: list[Chunk], logits: Logits) -> dict[RequestKey, int]:
        sampling = [c.sequence for c in chunks if c.samples]
        return {
            s.key: sample(row, s.params, s.key.choice, s.generated_len) for s, row in zip(sampling, logits, strict=True)
        }

    def _advance(self, schedule: Schedule, chunks: list[Chunk], tokens: dict[RequestKey, int]) -> StepOutput:
        decodes = sum(1 for c in chunks if c.length == 1 and c.samples)  # before tokens are appended
        new_tokens = []
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.advance(chunk.length)
            if sequence.key in tokens:
                new_tokens.append(self._append(sequence, tokens[sequence.key]))
        return StepOutput(
            tokens=tuple(new_tokens),
            kv_len={c.sequence.key: c.sequence.kv_len for c in chunks},
            preempted=tuple(s.key for s in schedule.preempted),
            prefill_tokens=sum(c.length for c in chunks) - decodes,
            decode_tokens=decodes,
        )

    def _append(self, sequence: Sequence, token_id: int) -> NewToken:
        position = sequence.generated_len
        reason = sequence.append(token_id)
        if reason is not None:
            self._scheduler.finish(sequence)
        return NewToken(sequence.key, position, token_id, reason)
