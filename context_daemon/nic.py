"""How fast this machine's network interface is, where the kernel knows. Never a guess."""

from __future__ import annotations

from pathlib import Path


def nic_bytes_per_s(root: Path = Path("/")) -> float | None:
    """Of the interface with the default route, in each direction; None when that is not known.

    A virtual interface has no speed of its own (a veth's is a constant of its driver), nor has one that is down.
    """
    interface = _default_interface(root / "proc/net/route")
    if interface is None:
        return None
    folder = root / "sys/class/net" / interface
    if not (folder / "device").exists() and not (folder / "bonding").exists():
        return None
    megabits = _number(folder / "speed")
    return megabits * 1e6 / 8 if megabits is not None and megabits > 0 else None


def _default_interface(routes: Path) -> str | None:
    """Of the default route with the lowest metric. Columns: name, destination, gateway, flags, refs, uses, metric, mask."""
    try:
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:  # no such kernel: not known
        return None
    defaults = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return min(defaults)[1] if defaults else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # EINVAL is the kernel's word for not known
        return None
