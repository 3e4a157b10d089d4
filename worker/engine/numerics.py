"""Names that decide whose bytes may be mixed with whose: the numerics class and the model's fingerprint."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch
import transformers

from worker.engine.config import EnginePlan

_BLOCK = 8 * 1024 * 1024


def numerics_class(plan: EnginePlan, threads: int, kernels: str) -> str:
    """Two engines of one class give bit-equal logits for equal inputs; across classes nothing is promised.

    `kernels` names what multiplies and in which shapes, `threads` is in it because libraries choose kernels by it.
    """
    parts = (
        f"{platform.machine()}-{_cpu_model()}-{torch.backends.cpu.get_cpu_capability().lower()}",
        f"torch-{torch.__version__}",
        f"transformers-{transformers.__version__}",
        plan.dtype,
        f"threads-{threads}",
        "tp-1",
        "quant-none",
        "batch-invariant" if plan.batch_invariant else "batch-variant",
        kernels,
    )
    return "/".join(parts)


def model_fingerprint(folder: Path, weight_files: tuple[str, ...]) -> str:
    """SHA-256 over config.json (architecture and RoPE settings) and every weight file, by content."""
    digest = hashlib.sha256()
    for file in (folder / "config.json", *map(Path, weight_files)):
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _cpu_model() -> str:
    """Vendor, family and model of the CPU: math libraries pick their kernels by these, not by instruction set alone."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    for line in info.read_text().split("\n\n")[0].splitlines() if info.is_file() else ():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    known = [fields[name] for name in ("vendor_id", "cpu family", "model") if name in fields]
    return "-".join(known) or platform.processor() or "unknown"
