from __future__ import annotations

import pytest

from context_daemon.kv_urls import server_names

_SECRET = "hunter2"


def test_a_server_is_named_by_host_and_port_alone() -> None:
    urls = [
        "redis://KV-1:7000/3",
        f"rediss://user:{_SECRET}@kv-1?ssl_ca_certs=/ca.pem",
        "redis://[::1]:7000",
        "unix:///run/kv",
    ]
    assert server_names(urls) == dict(zip(["kv-1:7000", "kv-1:6379", "::1:7000", "unix:/run/kv"], urls, strict=True))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (f"http://:{_SECRET}@kv", "redis://, rediss:// or unix://"),
        ("kv-1:6379", "redis://, rediss:// or unix://"),
        ("", "redis://, rediss:// or unix://"),
        ("redis://", "host is missing"),
        (f"redis://:{_SECRET}@:6379/0", "host is missing"),
        (f"redis://:{_SECRET}@kv:99999", "[Pp]ort"),
        (f"redis://:{_SECRET}@kv:0", "port 0"),
        (f"redis://u:p/{_SECRET}@kv", "%2F"),
        (f"redis://:{_SECRET}#1@kv", "%23"),
        (f"redis://:{_SECRET}?@kv", "%3F"),
        (f"redis://:{_SECRET}@[::1", "host is malformed"),
        (f"redis://:{_SECRET}@kv:many", "[Pp]ort"),
        (f"redis://:{_SECRET}@kv/cache", "database 'cache'"),
        ("redis://kv?socket_timeout=99", "socket_timeout"),
        ("unix://", "path of the socket"),
    ],
)
def test_a_wrong_url_is_named_with_its_fault_and_without_its_password(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        server_names(["redis://kv-9", url])
    assert _SECRET not in str(refused.value)


@pytest.mark.parametrize("again", ["redis://kv-1", "redis://KV-1:6379/0", "redis://kv-1/1", f"redis://:{_SECRET}@kv-1"])
def test_one_server_twice_is_refused(again: str) -> None:
    with pytest.raises(ValueError, match="kv-1:6379 is named twice") as refused:
        server_names(["redis://kv-1", "redis://kv-2", again])
    assert _SECRET not in str(refused.value)


def test_no_server_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        server_names([])
