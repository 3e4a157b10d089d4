"""The local cloud on real processes: machines come, are announced to go, go, and come again; and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import redis

from context_daemon.records import NoticeKind
from context_daemon.redis_store import RedisStore
from orchestrator.fleet import statefile
from orchestrator.fleet.local import procscan, reaper, shutdown
from tests.e2e.local_cluster import RunningCluster, tideover, until

pytestmark = [pytest.mark.slow, pytest.mark.ray]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    flags = ("--no-orchestrator", "--kv-servers", "2", "--kv-commit", "grace")
    running = RunningCluster(f"test-{os.getpid()}", tmp_path_factory.mktemp("state"), *flags)
    yield running
    running.down()


def assert_nothing_left(cluster: RunningCluster) -> None:
    assert procscan.find(cluster.scope) == []
    assert not Path(cluster.facts["runtime_dir"]).exists()
    assert reaper.shared_memory_of(cluster.facts["cluster_id"]) == []
    assert not (cluster.state_home / "tideover" / cluster.name / "cluster.json").exists()
    subnet = cluster.facts["ray_address"].rsplit(".", 2)[0] + "."
    taken = [c.laddr[0] for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr]
    assert [address for address in taken if address.startswith(subnet)] == []


def ray_labels(cluster: RunningCluster, token: str) -> subprocess.CompletedProcess[str]:
    """Ask Ray in a process of its own: it reads the token once, when it is imported."""
    code = (
        "import sys; from ray._raylet import GcsClient\n"
        "known = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)\n"
        "print(*(dict(info.labels).get('tideover-node') for info in known.values()))"
    )
    env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    command = [sys.executable, "-c", code, cluster.facts["ray_address"]]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_machines_join_ray_with_their_labels(cluster: RunningCluster) -> None:
    done = ray_labels(cluster, cluster.state.control_token)
    assert done.returncode == 0, done.stderr
    assert cluster.running() <= set(done.stdout.split())
    assert len(cluster.running()) == 2


def test_every_daemon_is_told_of_all_kv_servers_and_of_the_commit_mode(cluster: RunningCluster) -> None:
    urls = cluster.facts["kv_urls"]
    assert len(urls) == 2 and {"redis-kv", "redis-kv-2"} <= cluster.processes().keys()
    for url in urls:
        client = redis.Redis.from_url(url)
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        client.close()
    told = [f"--kv-url {url}" for url in urls] + ["--kv-commit grace"]
    for node in cluster.running():
        command = " ".join(psutil.Process(cluster.processes()[f"daemon-{node}"]["pid"]).cmdline())
        assert [part for part in told if part not in command] == []


def test_ray_refuses_whoever_has_no_token(cluster: RunningCluster) -> None:
    done = ray_labels(cluster, "0" * 64)
    assert done.returncode != 0
    assert "authent" in done.stderr.lower()


def test_the_token_is_needed_and_not_shown(cluster: RunningCluster) -> None:
    assert "control_token" not in cluster.facts
    state_file = cluster.state_home / "tideover" / cluster.name / "cluster.json"
    assert state_file.stat().st_mode & 0o077 == 0
    with pytest.raises(urllib.error.HTTPError) as refused:
        cluster.call("GET", "/v1/nodes", token="wrong")
    assert refused.value.code == 401


@pytest.mark.parametrize(
    ("path", "body", "code", "says"),
    [
        ("/v1/nodes/none/kill", {}, 404, "no machine 'none'"),
        ("/v1/processes/none/kill", {}, 404, "no process 'none'"),
        ("/v1/processes/redis-kv/kill", {"signal": "NONE"}, 400, "NONE"),
        ("/v1/processes/redis-kv/kill", {"signl": 9}, 400, "signl"),
        ("/v1/nodes/{node}/notice", {"kind": "explode"}, 400, "explode"),
        ("/v1/nodes/{node}/notice", {"deadline_s": -1}, 400, "deadline_s"),
    ],
)
def test_refusals_name_what_is_wrong(
    cluster: RunningCluster, path: str, body: dict[str, object], code: int, says: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        cluster.call("POST", path.format(node=min(cluster.running())), body)
    assert refused.value.code == code
    assert says in refused.value.read().decode()


async def test_a_noticed_machine_is_told_then_taken_at_the_deadline_then_replaced(cluster: RunningCluster) -> None:
    before = cluster.running()
    victim = min(before)
    pids = {p.pid for p in procscan.find(procscan.Scope(*_marks(cluster), victim))}
    assert len(pids) >= 5  # raylet, its starter, agents, daemon, watcher
    answer = cluster.call("POST", f"/v1/nodes/{victim}/notice", {"deadline_s": 3})
    store = RedisStore(cluster.facts["durable_url"])
    try:
        while not (noted := [n for n in await store.notices() if n.node_id == victim]):
            assert time.time() < answer["deadline"], "the watcher did not tell the daemon in time"
    finally:
        await store.close()
    assert [(n.kind, n.deadline) for n in noted] == [(NoticeKind.TERMINATE, answer["deadline"])]
    while time.time() < answer["deadline"] - 0.3:
        assert pids <= set(psutil.pids()), "taken before the deadline"
        await asyncio.sleep(0.05)
    until("the machine is gone", lambda: victim not in cluster.nodes(), 5)
    assert time.time() >= answer["deadline"]
    assert procscan.find(procscan.Scope(*_marks(cluster), victim)) == []
    new = until("a replacement runs", lambda: cluster.running() - before)
    assert len(new) == 1


def test_a_withdrawn_notice_takes_nothing(cluster: RunningCluster) -> None:
    node = min(cluster.running())
    cluster.call("POST", f"/v1/nodes/{node}/notice", {"deadline_s": 1})
    assert cluster.call("DELETE", f"/v1/nodes/{node}/notice")["deadline"] is None
    time.sleep(2.5)
    assert node in cluster.running()


def test_a_killed_machine_is_gone_at_once_and_replaced(cluster: RunningCluster) -> None:
    before = cluster.running()
    victim = min(before)
    cluster.call("POST", f"/v1/nodes/{victim}/kill")
    until("no process of it is left", lambda: not procscan.find(procscan.Scope(*_marks(cluster), victim)), 3)
    until("a replacement runs", lambda: cluster.running() - before)


def test_a_machine_whose_raylet_dies_is_lost_and_replaced(cluster: RunningCluster) -> None:
    before = cluster.running()
    victim = min(before)
    processes = procscan.find(procscan.Scope(*_marks(cluster), victim))
    raylet = next(p for p in processes if p.name() == "raylet")
    raylet.kill()
    until("the machine is gone", lambda: victim not in cluster.nodes(), 10)
    until("a replacement runs", lambda: cluster.running() - before)


def test_daemons_and_watchers_are_started_again(cluster: RunningCluster) -> None:
    node = min(cluster.running())
    for name in (f"daemon-{node}", f"watcher-{node}"):
        pid = cluster.processes()[name]["pid"]
        cluster.call("POST", f"/v1/processes/{name}/kill", {"signal": "SIGKILL"})
        until(f"{name} runs again", partial(_runs_anew, cluster, name, pid), 10)
        assert cluster.processes()[name]["restarts"] == 1
    assert node in cluster.running()


def test_the_durable_store_comes_back_with_its_data_after_the_asked_pause(cluster: RunningCluster) -> None:
    client = redis.Redis.from_url(cluster.facts["durable_url"])
    client.set("kept", "yes")
    time.sleep(1.2)  # appendfsync everysec
    cluster.call("POST", "/v1/processes/redis-durable/kill", {"signal": 9, "restart_after_s": 2})
    time.sleep(1.2)
    assert cluster.processes()["redis-durable"]["pid"] is None
    until("it is back", lambda: _pings(client), 10)
    assert client.get("kept") == b"yes"
    client.close()


def test_a_head_that_dies_takes_its_machines_and_all_come_again(cluster: RunningCluster) -> None:
    before = cluster.running()
    cluster.call("POST", "/v1/processes/head/kill", {})
    until("two new machines run", lambda: len(cluster.running() - before) == 2, 60)
    assert cluster.processes()["head"]["restarts"] == 1
    assert not before & cluster.nodes().keys()


def test_a_second_cluster_of_the_name_and_a_taken_port_are_refused(cluster: RunningCluster, tmp_path: Path) -> None:
    again = tideover("up", "--no-orchestrator", "--name", cluster.name, state_home=cluster.state_home)
    assert again.returncode == 2
    assert "runs already" in again.stderr
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = tideover("up", "--no-orchestrator", "--port", str(port), state_home=tmp_path)
    assert taken.returncode == 2
    assert f"port {port}" in taken.stderr


def test_down_leaves_nothing_but_jobs_and_logs(cluster: RunningCluster) -> None:
    began = time.monotonic()
    done = cluster.down()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"name": cluster.name, "was_running": True, "left": []}
    assert time.monotonic() - began < 10
    assert_nothing_left(cluster)
    folder = cluster.state_home / "tideover" / cluster.name
    assert {path.name for path in folder.iterdir()} == {"durable", "logs", "supervisor.log"}
    assert json.loads(cluster.down().stdout)["was_running"] is False


def test_a_supervisor_killed_hard_leaves_nothing(tmp_path: Path) -> None:
    cluster = RunningCluster("test-orphans", tmp_path, "--no-orchestrator", "--workers", "1")
    try:
        assert len(procscan.find(cluster.scope)) > 8
        os.kill(cluster.facts["pid"], signal.SIGKILL)
        until("everything is gone", lambda: not procscan.find(cluster.scope), 5)
        until("and cleaned up", lambda: not (tmp_path / "tideover/test-orphans/cluster.json").exists(), 5)
        assert_nothing_left(cluster)
    finally:
        cluster.down()


def test_what_is_left_when_supervisor_and_reaper_are_both_killed_goes_with_down(tmp_path: Path) -> None:
    cluster = RunningCluster("test-both", tmp_path, "--no-orchestrator", "--workers", "1")
    children = psutil.Process(cluster.facts["pid"]).children()
    reaping = next(child for child in children if "orchestrator.fleet.local.reaper" in child.cmdline())
    reaping.kill()
    os.kill(cluster.facts["pid"], signal.SIGKILL)
    time.sleep(0.5)
    assert procscan.find(cluster.scope) != []
    done = cluster.down()
    assert json.loads(done.stdout) == {"name": cluster.name, "was_running": True, "left": []}
    assert_nothing_left(cluster)


@pytest.mark.parametrize("after_s", [0.7, 4.0])
def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path, after_s: float) -> None:
    """Twice in a row, as an impatient person does."""
    command = [sys.executable, "-m", "orchestrator.cli", "up", "--no-orchestrator", "--name", "test-int", "--port", "0"]
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    up = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    path = tmp_path / "tideover" / "test-int" / "cluster.json"
    until("it starts", path.exists)
    state = statefile.decode(path)
    time.sleep(after_s)
    up.send_signal(signal.SIGINT)
    time.sleep(0.1)
    up.send_signal(signal.SIGINT)
    _, said = up.communicate(timeout=10)
    assert up.returncode == 0, said
    assert shutdown.leftovers(state) == []
    assert not path.exists()


def _runs_anew(cluster: RunningCluster, name: str, old_pid: int) -> bool:
    return cluster.processes()[name]["pid"] not in (None, old_pid)


def _marks(cluster: RunningCluster) -> tuple[str, str]:
    return cluster.facts["cluster_id"], cluster.facts["runtime_dir"]


def _pings(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.exceptions.ConnectionError:
        return False
