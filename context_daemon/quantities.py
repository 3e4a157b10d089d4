"""Amounts of bytes as people write them: 200MB, 1.5GB, 2GiB."""

from __future__ import annotations

import re

import click

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 10 ** (3 * _power), f"{_letter}b": 10 ** (3 * _power), f"{_letter}ib": 2 ** (10 * _power)}
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """KB, MB, GB and TB (or K, M, G, T) are powers of 1000, KiB, MiB, GiB and TiB of 1024, in any case; rounded to whole
    bytes. Raises ValueError for anything else, negative amounts among it."""
    match = _AMOUNT.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no amount of bytes: write 200000000, 200MB, 1.5GB or 2GiB")
    return round(float(match[1]) * unit)


class ByteCount(click.ParamType[int]):
    """For command lines; with `per_second` also 200MB/s."""

    name = "bytes"

    def __init__(self, per_second: bool = False) -> None:
        self._per_second = per_second

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = value.strip()
        try:
            return parse_bytes(text.removesuffix("/s") if self._per_second else text)
        except ValueError as error:
            self.fail(str(error), param, ctx)
