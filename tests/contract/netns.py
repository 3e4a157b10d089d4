"""Hosts on one machine: network namespaces with a link between them and a link each to us. Linux, root and iproute2 only."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count


def missing() -> str:
    """Why there can be no namespaces here; "" when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc (iproute2) are not installed"
    probe = subprocess.run(["ip", "netns", "add", f"tide-probe-{os.getpid()}"], capture_output=True, check=False)
    if probe.returncode:
        return f"no network namespace can be made: {probe.stderr.decode().strip()}"
    _run("ip", "netns", "delete", f"tide-probe-{os.getpid()}")
    return ""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.decode().strip()}")


_TURNS = count()


@dataclass(frozen=True, slots=True)
class Host:
    """`ours` is our end of the link to it, `control` its end, `peer` its address towards the other host."""

    name: str
    device: str  # of the link to the other host
    ours: str
    control: str
    peer: str

    def command(self, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *argv]

    def link(self, state: str) -> None:
        """up or down: the link to the other host."""
        _run("ip", "-n", self.name, "link", "set", self.device, state)

    def limit(self, rate: str) -> None:
        """Bandwidth towards the other host, as tc writes it: 100mbit."""
        shape = ("rate", rate, "burst", "256kb", "latency", "200ms")
        _run("ip", "netns", "exec", self.name, "tc", "qdisc", "replace", "dev", self.device, "root", "tbf", *shape)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Always deleted at the end, with all that is in them."""
    turn = next(_TURNS)  # a deleted namespace's links stay for a moment
    tag, net = f"t{os.getpid() % 10**6}{turn % 10}", 64 + (os.getpid() + turn) % 128
    hosts = tuple(
        Host(f"{tag}{side}", f"{tag}p{side}", f"10.{net}.{n}.1", f"10.{net}.{n}.2", f"10.{net}.9.{n}")
        for n, side in enumerate("ab", 1)
    )
    try:
        for n, host in enumerate(hosts, 1):
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", f"{tag}r{n}", "type", "veth", "peer", "name", f"{tag}c{n}", "netns", host.name)
            _run("ip", "addr", "add", f"{host.ours}/30", "dev", f"{tag}r{n}")
            _run("ip", "link", "set", f"{tag}r{n}", "up")
            _run("ip", "-n", host.name, "addr", "add", f"{host.control}/30", "dev", f"{tag}c{n}")
            _run("ip", "-n", host.name, "link", "set", f"{tag}c{n}", "up")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
        a, b = hosts
        _run("ip", "link", "add", a.device, "netns", a.name, "type", "veth", "peer", "name", b.device, "netns", b.name)
        for host in hosts:
            _run("ip", "-n", host.name, "addr", "add", f"{host.peer}/24", "dev", host.device)
            host.link("up")
        yield a, b
    finally:
        for host in hosts:  # their links go with them
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


@contextmanager
def forwarded(host: Host, port: int) -> Iterator[str]:
    """A server that listens on our loopback, reachable from `host`: its host:port there."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    addresses: list[str] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one side has gone: so must the other
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    async def start() -> None:
        server = await asyncio.start_server(serve, host.ours, 0)
        addresses.append(f"{host.ours}:{server.sockets[0].getsockname()[1]}")
        ready.set()
        async with server:
            await server.serve_forever()

    def run() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        finally:
            loop.close()

    task = loop.create_task(start())
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
