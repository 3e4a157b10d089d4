"""Every key of the durable store: its name, type, what it holds and how long it lives.

All keys of one job carry the hash tag `{job_id}`, so that a script stays within one slot. Scripts get the job's `meta`
key and derive the others from it. `rid` is the line, or `line.choice` for choices after the first.

| key                    | type   | holds                                                                    | TTL  |
|------------------------|--------|--------------------------------------------------------------------------|------|
| `to:{job}:meta`        | hash   | JobRecord's fields; `term` highest orchestrator term seen; `inc`         | none |
| `to:{job}:pending`     | zset   | rid by line while VALIDATING; renamed to `ready` by the start            | none |
| `to:{job}:ready`       | zset   | rid by line: READY requests                                              | none |
| `to:{job}:leased`      | zset   | rid by line: LEASED requests                                             | none |
| `to:{job}:r:<rid>`     | hash   | one request: state, token, owner, watermark, segments, counts, its spec  | none |
| `to:{job}:t:<rid>`     | string | its token log: packed int32, little endian, written by SETRANGE          | none |
| `to:{job}:results`     | list   | `line:ok:payload` in completion order, pushed by the finishing script    | none |
| `to:{job}:intr`        | hash   | `rid:epoch that took over` -> InterruptionRow, msgpack                   | none |
| `to:reqid:<id>`        | string | job_id that a client's request_id stands for (may dangle)                | none |
| `to:jobs`              | zset   | every job_id by creation time in microseconds (derived, may dangle)      | none |
| `to:active`            | zset   | job_ids that may be active, by creation time (derived, may dangle)       | none |
| `to:fleet:workers`     | hash   | worker_id -> `expiry_us:WorkerStatus` msgpack; expired fields are dropped | own  |
| `to:fleet:notices`     | hash   | notice_id -> `expiry_us:Notice` msgpack; expired fields are dropped      | own  |
| `to:leader`            | hash   | holder, term, until (microseconds); `server`: the id that a leader noted | none |
| `to:incarnation`       | string | grows when the store came back from a loss; absent means 1               | none |
| `to:mark:<writer>`     | string | a number that grows behind each of a writer's writes (see write_mark.py) | 24 h |

Times are microseconds by the server's own clock, written as whole numbers.
"""

from __future__ import annotations

import re

from context_daemon.records import RequestKey

JOBS = "to:jobs"
ACTIVE = "to:active"
WORKERS = "to:fleet:workers"
NOTICES = "to:fleet:notices"
LEADER = "to:leader"
INCARNATION = "to:incarnation"
META_PATTERN = "to:{*}:meta"

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def checked_job(job_id: str) -> str:
    """The id, checked: braces or colons in it would move the job's keys to another slot."""
    if not _JOB_ID.fullmatch(job_id):
        raise ValueError(f"job id {job_id!r}: use 1 to 128 letters, digits, '_', '.' or '-'")
    return job_id


def meta(job_id: str) -> str:
    return f"to:{{{checked_job(job_id)}}}:meta"


def job_of_meta(key: str) -> str:
    return key[len("to:{") : -len("}:meta")]


def results(job_id: str) -> str:
    return f"to:{{{checked_job(job_id)}}}:results"


def interruptions(job_id: str) -> str:
    return f"to:{{{checked_job(job_id)}}}:intr"


def request_id(value: str) -> str:
    return f"to:reqid:{value}"


def mark(writer: str) -> str:
    return f"to:mark:{writer}"


def rid(key: RequestKey) -> str:
    return f"{key.line}.{key.choice}" if key.choice else str(key.line)


def parse_rid(job_id: str, value: str) -> RequestKey:
    line, _, choice = value.partition(".")
    return RequestKey(job_id, int(line), int(choice or 0))
