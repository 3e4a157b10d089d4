"""What a node's KV traffic comes to: rates over a window, the interface's share, money; what is not known is not shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from context_daemon.nic import nic_bytes_per_s
from context_daemon.traffic import WINDOW_S, Meter, Tariff, Totals, Way, figures
from orchestrator.cli.cluster import up

DOC = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
NOTHING = dict.fromkeys(Way, 0.0)


def test_the_documents_example_is_what_comes_out() -> None:
    text = DOC.read_text().split("## Seen in metrics")[1]
    command = re.search(r"tideover up (--.*)", text)
    assert command is not None
    flags = up.make_context("up", shlex.split(command[1])).params
    prices = (flags["kv_price_per_gb"], flags["peer_price_per_gb"], flags["instance_price"])
    shown = {name: float(value) for name, value in re.findall(r"\| `tideover_(\S+)` \| (\S+) \|", text)}
    assert len(shown) == 7
    traffic = 'kv_traffic_bytes_per_second{place="%s",direction="out"}'
    assert shown[traffic % "store"] == 2000 * 128 * 1024, "the class of worker that the page speaks of"
    minute = {Way.STORE_OUT: 60 * shown[traffic % "store"], Way.PEER_OUT: 60 * shown[traffic % "peer"]}
    found = figures(NOTHING, NOTHING | minute, 60.0, Tariff(*prices, flags["nic_bandwidth"]))
    computed = {f'kv_nic_share{{place="{way.place}",direction="out"}}': found.nic_share[way] for way in minute}
    computed |= {traffic % way.place: found.bytes_per_s[way] for way in minute}
    computed |= {f'money_per_hour{{what="{what}"}}': cost for what, cost in found.per_hour.items()}
    assert shown == pytest.approx(computed, rel=1e-3)
    factor = shown['money_per_hour{what="store"}'] / shown['money_per_hour{what="instance"}']
    assert 15.5 < factor < 16.5 and "sixteen times the machine" in text


def test_what_is_not_known_is_not_there() -> None:
    found = figures(NOTHING, dict.fromkeys(Way, 5e9), 10.0, Tariff())
    assert found.bytes_per_s == dict.fromkeys(Way, 5e8)
    assert found.nic_share == {} and found.per_hour == {}
    priced = figures(NOTHING, dict.fromkeys(Way, 5e9), 3600.0, Tariff(store_per_gb=0.5, peer_per_gb=0.25))
    assert priced.per_hour == pytest.approx({"store": 2 * 5 * 0.5, "peer": 5 * 0.25}), "a peer pays for what it sends"


def test_the_window_slides_and_a_young_process_shows_no_spike() -> None:
    now, total = 100.0, 0.0

    def read() -> Totals:
        return NOTHING | {Way.STORE_OUT: total}

    meter = Meter(read, lambda: now, Tariff())
    total, now = 1000.0, 100.001
    assert meter.figures().bytes_per_s[Way.STORE_OUT] == 1000.0, "per second at least"
    for _ in range(300):
        now += 1.0
        total += 50.0
        meter.tick()
    assert meter.figures().bytes_per_s[Way.STORE_OUT] == pytest.approx(50.0), "the first thousand are long ago"
    for _ in range(int(WINDOW_S) + 2):
        now += 1.0
        meter.tick()
    assert meter.figures().bytes_per_s[Way.STORE_OUT] == 0.0


@pytest.mark.parametrize(
    ("tariff", "says"),
    [
        ({"store_per_gb": -1.0}, "--kv-price-per-gb -1"),
        ({"peer_per_gb": float("nan")}, "--peer-price-per-gb nan"),
        ({"instance_per_hour": float("inf")}, "--instance-price inf"),
        ({"nic_bytes_per_s": 0.0}, "--nic-bandwidth 0"),
    ],
)
def test_tariffs_that_cannot_be_meant(tariff: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Tariff(**tariff)


ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
slow0 00000000 010200C0 0003 0 0 600 00000000 0 0 0
eth0 00000000 010200C0 0003 0 0 100 00000000 0 0 0
eth0 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0
"""


@pytest.mark.parametrize(
    ("speed", "device", "routes", "expected"),
    [
        ("10000\n", True, ROUTES, 1.25e9),
        ("10000\n", False, ROUTES, None),  # a veth says so whatever lies below
        ("-1\n", True, ROUTES, None),
        ("", True, ROUTES, None),
        ("10000\n", True, ROUTES.splitlines()[0], None),
        ("10000\n", True, None, None),
    ],
)
def test_an_interfaces_speed_is_the_kernels_word_or_nothing(
    tmp_path: Path, speed: str, device: bool, routes: str | None, expected: float | None
) -> None:
    for name, text in (("eth0", speed), ("slow0", "100\n")):
        folder = tmp_path / "sys/class/net" / name
        (folder / "device" if device else folder).mkdir(parents=True)
        (folder / "speed").write_text(text)
    if routes is not None:
        (tmp_path / "proc/net").mkdir(parents=True)
        (tmp_path / "proc/net/route").write_text(routes)
    assert nic_bytes_per_s(tmp_path) == expected
