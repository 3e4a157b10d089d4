"""What an engine is told at start, and what it refuses before a byte of weights is read.

No torch here: the command line and the orchestrator check a model folder before they start anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from context_daemon.records import PAGE_SIZE
from worker.engine.model_folder import ModelSpec, inspect_model_folder

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
GIB = 1024**3


class EngineConfigError(Exception):
    """The engine cannot start like this; the message says what to change."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Engine flags by vLLM's names. `None` means: take it from the model or the machine.

    `num_pages` wins over `kv_cache_memory_bytes`; with neither, a quarter of the free memory holds KV, or what
    `max_num_seqs` sequences of full length need, whichever is less.
    """

    model: str
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    page_size: int = PAGE_SIZE
    num_pages: int | None = None
    kv_cache_memory_bytes: int | None = None
    dtype: str = "float32"
    num_threads: int | None = None
    batch_invariant: bool = True


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """An `EngineConfig` with every question answered, known to fit this machine."""

    spec: ModelSpec
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    dtype: str
    num_threads: int | None
    batch_invariant: bool

    @property
    def slot_bytes(self) -> int:
        return self.spec.slot_elements * DTYPE_BYTES[self.dtype]


def plan_engine(config: EngineConfig, available_bytes: int) -> EnginePlan:
    """Check `config` against its model folder and the free memory. Raises EngineConfigError or ModelFolderError."""
    _check_flags(config)
    spec = inspect_model_folder(Path(config.model))
    max_model_len = _max_model_len(config, spec)
    slot = spec.slot_elements * DTYPE_BYTES[config.dtype]
    weights = _weight_elements(config, spec) * DTYPE_BYTES[config.dtype]
    num_pages = _num_pages(config, max_model_len, slot, available_bytes - weights)
    _check_memory(weights, num_pages * config.page_size * slot, available_bytes)
    return EnginePlan(
        spec=spec,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        page_size=config.page_size,
        num_pages=num_pages,
        dtype=config.dtype,
        num_threads=config.num_threads,
        batch_invariant=config.batch_invariant,
    )


def _weight_elements(config: EngineConfig, spec: ModelSpec) -> int:
    """In batch-invariant mode products have their own packed copy: a head cannot share the embedding's memory."""
    copied = spec.vocab_size * spec.hidden_size if config.batch_invariant and spec.tied_head else 0
    return spec.num_parameters + copied


def _check_flags(config: EngineConfig) -> None:
    optional = ("max_model_len", "num_pages", "kv_cache_memory_bytes", "num_threads")
    for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", *optional):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise EngineConfigError(f"{name} is {value}: it must be at least 1")
    if config.dtype not in DTYPE_BYTES:
        raise EngineConfigError(f"dtype {config.dtype!r} is not supported: use one of {', '.join(DTYPE_BYTES)}")
    if config.batch_invariant and config.dtype != "float32":
        raise EngineConfigError(
            f"batch_invariant is promised for float32 only, dtype is {config.dtype!r}: set one of them differently"
        )
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise EngineConfigError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} is less than max_num_seqs {config.max_num_seqs}: "
            "every running sequence needs room for one token in each step"
        )
    if 64 % config.page_size:
        raise EngineConfigError(f"page_size {config.page_size} must divide 64, the attention's block of positions")


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        return spec.max_position_embeddings
    if config.max_model_len > spec.max_position_embeddings:
        raise EngineConfigError(
            f"max_model_len {config.max_model_len} is beyond the model's max_position_embeddings "
            f"{spec.max_position_embeddings} ({spec.path})"
        )
    return config.max_model_len


def _num_pages(config: EngineConfig, max_model_len: int, slot_bytes: int, free_bytes: int) -> int:
    if config.num_pages is not None:
        return config.num_pages
    page_bytes = config.page_size * slot_bytes
    if config.kv_cache_memory_bytes is not None:
        pages = config.kv_cache_memory_bytes // page_bytes
        if pages < 1:
            raise EngineConfigError(
                f"kv_cache_memory_bytes {config.kv_cache_memory_bytes} holds no page: one page is {page_bytes} bytes"
            )
        return pages
    wanted = config.max_num_seqs * -(-max_model_len // config.page_size)
    return max(1, min(wanted, free_bytes // 4 // page_bytes))


def _check_memory(weights: int, kv: int, available: int) -> None:
    if weights + kv > available:
        raise EngineConfigError(
            f"too little memory: needs {weights / GIB:.2f} GiB for weights + {kv / GIB:.2f} GiB for KV, "
            f"{available / GIB:.2f} GiB available; lower num_pages or kv_cache_memory_bytes, or take a larger machine"
        )
