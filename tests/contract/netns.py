"""Two network namespaces that reach each other over one veth pair, and this one over a pair each. Needs root and `ip`."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Self

_NETWORKS = 1 << 12  # in 100.64.0.0/12


def why_not() -> str:
    """What is missing here to make namespaces; empty when nothing is."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the `ip` command (iproute2)"
    made = subprocess.run(["ip", "netns", "add", f"tvt{os.getpid()}"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", f"tvt{os.getpid()}"], capture_output=True, check=False)
    return f"this machine makes no network namespaces: {made.stderr.strip()}" if made.returncode else ""


@dataclass(frozen=True)
class Namespace:
    """`outer` is its address for this process, `inner` the one for the other namespace."""

    name: str
    outer: str
    inner: str
    device: str  # of the pair between the two

    def within(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]


class TwoNamespaces:
    """A context manager that deletes what it made, whatever happens. `home` is this process's address for both."""

    def __init__(self) -> None:
        pid = os.getpid()
        net = next(n for n in (pid * 7 + i for i in range(_NETWORKS)) if _prefix(n) not in _addresses())
        self._prefix = _prefix(net)
        self.home = self._at(1)
        self.a = Namespace(f"tv{pid}a", self._at(2), self._at(9), f"tv{pid}ab")
        self.b = Namespace(f"tv{pid}b", self._at(6), self._at(10), f"tv{pid}ba")

    def _at(self, host: int) -> str:
        return f"{self._prefix}{host}"

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        for space, router in ((self.a, self.home), (self.b, self._at(5))):
            _ip("netns", "add", space.name)
            _ip("link", "add", space.name + "o", "type", "veth", "peer", "name", space.name + "i", "netns", space.name)
            _ip("addr", "add", f"{router}/30", "dev", space.name + "o")
            _ip("link", "set", space.name + "o", "up")
            for device, address in (("lo", ""), (space.name + "i", f"{space.outer}/30")):
                self._inside(space, device, address)
            _ip("-n", space.name, "route", "add", "default", "via", router)
        _ip("-n", self.a.name, "link", "add", self.a.device, "type", "veth", "peer", "name", self.b.device,
            "netns", self.b.name)  # fmt: skip
        for space in (self.a, self.b):
            self._inside(space, space.device, f"{space.inner}/30")

    @staticmethod
    def _inside(space: Namespace, device: str, address: str) -> None:
        if address:
            _ip("-n", space.name, "addr", "add", address, "dev", device)
        _ip("-n", space.name, "link", "set", device, "up")

    def slow(self, rate: str) -> None:
        """What `a` sends to `b` goes at this rate, as in 50mbit."""
        command = f"tc -n {self.a.name} qdisc add dev {self.a.device} root tbf rate {rate} burst 32kb latency 50ms"
        subprocess.run(command.split(), check=True, capture_output=True)

    def link(self, up: bool) -> None:
        """The pair between the two; their way to this process is another."""
        _ip("-n", self.a.name, "link", "set", self.a.device, "up" if up else "down")

    def __exit__(self, *exc: object) -> None:
        for space in (self.a, self.b):
            subprocess.run(["ip", "link", "del", space.name + "o"], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", space.name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _prefix(net: int) -> str:
    """The first three numbers of the addresses of one pair of namespaces."""
    return f"100.{64 + net // 256 % 16}.{net % 256}."


def _addresses() -> str:
    return subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True, check=False).stdout
