"""What is said about KV on a command line: amounts, modes, budgets, and how `tideover up` hands them on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from context_daemon.__main__ import main as daemon_main
from context_daemon.commit_mode import KVCommit, ShipBudget
from context_daemon.quantities import parse_bytes
from orchestrator.cli import main
from orchestrator.cli.cluster import up
from orchestrator.fleet import statefile
from orchestrator.fleet.local import checks, commands, options
from orchestrator.fleet.local.options import ClusterOptions


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("4096", 4096), ("200MB", 200_000_000), ("1.5GB", 1_500_000_000), ("1.5g", 1_500_000_000),
        ("2GiB", 2 << 30), ("64 kib", 65536), (" 1TB ", 10**12), (".5K", 500), ("3b", 3),
    ],
)  # fmt: skip
def test_amounts_of_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "1,5GB", "1XB", "1MBit", "1 MB/s", "inf", "nan", "1MM"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(ValueError, match=r"no amount of bytes.*1\.5GB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("mode", "numbers", "says"),
    [
        (KVCommit.AUTO, {"bandwidth": -1.0}, "--kv-bandwidth -1"),
        (KVCommit.AUTO, {"cost_per_hour": float("nan"), "price_per_gb": 1.0}, "--kv-cost-budget nan"),
        (KVCommit.STORE, {"price_per_gb": -0.5}, "--kv-price-per-gb -0.5"),
        (KVCommit.GRACE, {"bandwidth": 5.0}, "auto only, and this is --kv-commit grace"),
        (KVCommit.STORE, {"cost_per_hour": 5.0, "price_per_gb": 1.0}, "--kv-cost-budget bounds --kv-commit auto only"),
        (KVCommit.AUTO, {"cost_per_hour": 5.0}, "give --kv-price-per-gb"),
    ],
)
def test_budgets_that_cannot_be_meant(mode: KVCommit, numbers: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ShipBudget(mode, **numbers)


def test_budgets_that_can() -> None:
    assert ShipBudget(KVCommit.AUTO, 1e9, 3.6, 0.01).bytes_per_s == pytest.approx(1e8)
    assert ShipBudget(KVCommit.AUTO, 1e7, 3.6, 0.01).bytes_per_s == 1e7
    ShipBudget(KVCommit.AUTO, price_per_gb=0.01)
    ShipBudget(KVCommit.AUTO, cost_per_hour=0.0, price_per_gb=0.01)


def daemon_flags(**asked: Any) -> tuple[str, ...]:
    wanted = ClusterOptions(**asked)
    return commands.daemon(wanted, "n1", "127.1.0.12:7010", "redis://d:1/0", ["redis://k:1/0", "redis://k:2/0"])


def test_a_daemon_is_told_what_was_asked_for_and_all_kv_servers() -> None:
    argv = daemon_flags(kv_commit=KVCommit.AUTO, kv_bandwidth=200_000_000, kv_cost_budget=1.5, kv_price_per_gb=0.01)
    text = " ".join(argv)
    assert "--kv-url redis://k:1/0 --kv-url redis://k:2/0" in text
    assert "--kv-commit auto --kv-bandwidth 200000000 --kv-cost-budget 1.5 --kv-price-per-gb 0.01" in text
    priced = " ".join(daemon_flags(kv_price_per_gb=0.0, peer_price_per_gb=0.5, instance_price=2.0, nic_bandwidth=10**9))
    assert "--kv-price-per-gb 0.0 --peer-price-per-gb 0.5 --instance-price 2.0 --nic-bandwidth 1000000000" in priced
    assert not {"--kv-bandwidth", "--arena-bytes", "--kv-price-per-gb", "--nic-bandwidth"} & set(daemon_flags())


def test_the_daemon_takes_what_it_is_told() -> None:
    argv = daemon_flags(
        kv_commit=KVCommit.AUTO, kv_bandwidth=200_000_000, kv_cost_budget=1.5, kv_price_per_gb=0.01, arena_bytes=1 << 24
    )
    context = daemon_main.make_context("daemon", list(argv[3:]))
    told = {name: context.params[name] for name in ("kv_urls", "kv_commit", "kv_bandwidth", "arena_bytes")}
    assert told == {
        "kv_urls": ("redis://k:1/0", "redis://k:2/0"), "kv_commit": KVCommit.AUTO, "kv_bandwidth": 200_000_000,
        "arena_bytes": 1 << 24,
    }  # fmt: skip
    assert context.params["kv_commit"] is KVCommit.AUTO


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv-url", "redis://h", "--kv-url", "redis://u:secret@h:6379"], "h:6379 is named twice"),
        (["--kv-url", "http://h"], "redis://"),
        (["--kv-url", "redis://h", "--kv-bandwidth", "5MB/s"], "--kv-commit auto only"),
        (["--kv-url", "redis://h", "--arena-bytes", "1KB"], "at least 1048576"),
    ],
)
def test_a_daemon_refuses_to_start_with_what_it_cannot_mean(flags: list[str], says: str) -> None:
    refused = CliRunner().invoke(daemon_main, ["--node-id", "n", "--durable-url", "redis://d", *flags])
    assert refused.exit_code == 1 and says in str(refused.output) and "secret" not in refused.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv-commit", "never"], "'store', 'arena', 'grace', 'auto'"),
        (["--kv-bandwidth", "-200MB"], "no amount of bytes"),
        (["--kv-commit", "auto", "--kv-cost-budget", "2"], "give --kv-price-per-gb"),
        (["--kv-commit", "auto", "--kv-cost-budget", "-2", "--kv-price-per-gb", "1"], "--kv-cost-budget -2"),
        (["--kv-bandwidth", "200MB"], "this is --kv-commit store"),
        (["--instance-price", "-1"], "--instance-price -1"),
        (["--nic-bandwidth", "0"], "--nic-bandwidth 0"),
        (["--kv-servers", "0"], "1<=x<=16"),
        (["--arena-bytes", "1KB"], "at least 1048576"),
        (["--arena-bytes", "900TB"], "this machine has"),
    ],
)
def test_up_refuses_before_it_starts_anything(
    flags: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    refused = CliRunner().invoke(main, ["up", "--no-orchestrator", "--port", "0", *flags])
    assert refused.exit_code == 2 and says in " ".join(refused.output.split())
    assert list(tmp_path.iterdir()) == []


def test_up_passes_its_flags_on() -> None:
    flags = ["--kv-servers", "3", "--kv-commit", "auto", "--kv-bandwidth", "1.5GB/s", "--arena-bytes", "64MiB"]
    params = up.make_context("up", flags).params
    asked = {name: params[name] for name in ("kv_servers", "kv_commit", "kv_bandwidth", "arena_bytes")}
    assert asked == {"kv_servers": 3, "kv_commit": "auto", "kv_bandwidth": 1_500_000_000, "arena_bytes": 64 << 20}
    wanted = ClusterOptions(port=0, orchestrator=False, **asked)
    assert wanted.kv_ports == {"redis-kv": 7002, "redis-kv-2": 7102, "redis-kv-3": 7103}
    assert wanted.ship_budget.bytes_per_s == 1.5e9


def test_a_taken_kv_port_makes_another_subnet() -> None:
    ports = ClusterOptions(kv_servers=2).kv_ports.values()
    first, claim = options.claim_subnet("same", ports)
    claim.close()
    taken = options._bind(first.supervisor, 7102)
    assert taken is not None
    second, other = options.claim_subnet("same", ports)
    assert second != first
    other.close()
    taken.close()


def test_each_kv_server_takes_its_memory_from_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(checks, "plan_engine", lambda config, share: seen.append(share))
    for servers in (1, 3):
        checks.plan(ClusterOptions(model="m", workers=1, kv_servers=servers), available_bytes=16 << 30)
    assert seen[0] - seen[1] == 2 * ClusterOptions().kv_store_memory


def test_the_state_file_of_an_older_version_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    old = {name: "x" for name in statefile.ClusterState.__struct_fields__ if name != "kv_urls"}
    path.write_text(json.dumps(old | {"pid": 1, "pid_started": 1.0, "started_at": 1.0, "kv_url": "x"}))
    assert statefile.decode(path).kv_urls == ()
