"""What every command shares: the connection, JSON on stdout, people's text on stderr, and exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import click
import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console

from orchestrator.client import NotReached, TideoverClient, TideoverError
from orchestrator.fleet.local.options import ClusterOptions
from orchestrator.fleet.statefile import read_cluster

FAILED = 1  # the job failed, or answers differ
USAGE = 2  # the command, or what it was given, is wrong

_PATIENCE_S = 120.0  # people who wait for a job outlast the restart of a store or an orchestrator

_USAGE_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
}

P = ParamSpec("P")
R = TypeVar("R")

# Off a terminal nothing is wrapped: logs are searched by the line.
console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 200)


def address_option(command: Callable[P, R]) -> Callable[P, R]:
    return click.option(
        "--address",
        default=None,
        help="host:port of the cluster's API. By default $TIDEOVER_ADDRESS, else the local cluster of `tideover up`.",
    )(command)


def json_option(command: Callable[P, R]) -> Callable[P, R]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else there.")(command)


def connect(address: str | None) -> TideoverClient:
    """A client of the cluster that is meant; exits with a hint if there is none."""
    found = address or os.environ.get("TIDEOVER_ADDRESS")
    if not found:
        state = read_cluster(os.environ.get("TIDEOVER_CLUSTER_NAME", ClusterOptions().name))
        if state is None:
            fail("no cluster is up here: start one with `tideover up`, or name one with --address host:port", USAGE)
        found = state.api_address
    if ":" not in found:
        fail(f"--address {found!r} is not host:port", USAGE)
    return TideoverClient(found, patience_s=_PATIENCE_S, on_away=lambda text: console.print(text, markup=False))


def fail(message: str, code: int) -> NoReturn:
    console.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    sys.exit(code)


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


def as_dict(message: Message) -> dict[str, Any]:
    """A message as JSON people expect: snake_case names, 64-bit integers as numbers, defaults present."""
    plain = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    _numbers(plain, message.DESCRIPTOR)
    return plain


def _numbers(plain: dict[str, Any], kind: Any) -> None:
    """protobuf's JSON writes 64-bit integers as strings; here they become numbers, at every depth."""
    for field in kind.fields:
        if field.name not in plain or (field.message_type and field.message_type.GetOptions().map_entry):
            continue
        value = plain[field.name]
        if field.message_type:
            for item in value if isinstance(value, list) else [value]:
                _numbers(item, field.message_type)
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            plain[field.name] = [int(item) for item in value] if isinstance(value, list) else int(value)


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn a failed call into one clear message, line errors listed, and the exit code that fits."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except TideoverError as error:
            for item in error.line_errors[:100]:
                where = f"line {item.line}" if item.line else "file"
                param = f" {item.param}:" if item.param else ""
                console.print(f"{where}:{param} {item.message}", markup=False, soft_wrap=True)
            message = str(error).splitlines()[0] if error.line_errors else str(error)
            wrong = isinstance(error, NotReached) or error.code in _USAGE_CODES
            fail(message, USAGE if wrong else FAILED)

    return wrapped
