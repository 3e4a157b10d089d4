"""What a context daemon exports."""

from __future__ import annotations

from context_daemon.observability import LATENCY_BUCKETS, Counter, Gauge, Histogram

COMMITS = Counter("tideover_commits_total", "Request commits by status (ok, fenced, gap, diverged)", ["status"])
COMMIT_SECONDS = Histogram("tideover_commit_seconds", "Durable commit of one step", buckets=LATENCY_BUCKETS)
FENCED = Counter("tideover_fenced_writes_total", "Writes refused because another owner holds the lease")
DIVERGENCES = Counter("tideover_divergences_total", "Commits with other tokens than those committed: must stay 0")
AHEAD = Gauge("tideover_ahead_commits", "Commits by owners unknown to the store: it lost acknowledged writes")
COMMITTED_TOKENS = Counter("tideover_committed_tokens_total", "Tokens of acknowledged commits, repeats included")
KV_BYTES = Counter("tideover_kv_bytes_written_total", "Framed KV bytes written to the KV store")
KV_BYTES_READ = Counter("tideover_kv_bytes_read_total", "Framed KV bytes read by restores")
RESTORES = Counter("tideover_restores_total", "Restores by outcome (record, kv, not_owner, unknown)", ["outcome"])
HANDOVERS = Counter("tideover_handovers_total", "Cut-overs by outcome (moved, refused)", ["outcome"])
STORE_ERRORS = Counter(
    "tideover_store_errors_total", "Calls that found a store away, by store (durable, kv)", ["store"]
)
NOTICES = Gauge("tideover_notices", "Notices of this node that stand")
ARENA_BYTES = Gauge("tideover_arena_used_bytes", "Bytes of the arena that are granted or hold pages")
ARENA_SLOTS = Counter("tideover_arena_slots_total", "KV slots that workers wrote into the arena")
EVICTED_PAGES = Counter("tideover_arena_evicted_pages_total", "Pages that left a full arena before their request ended")
RESTORE_PATHS = Counter("tideover_restore_paths_total", "Restores by the path that was chosen", ["path"])
RESTORE_SECONDS = Histogram(
    "tideover_restore_seconds", "Time pages took to come, by source", ["source"], buckets=LATENCY_BUCKETS
)
RESTORE_BYTES = Counter("tideover_restore_bytes_total", "Bytes of pages that came, by source", ["source"])
RESTORE_ERROR = Gauge("tideover_restore_prediction_factor", "By what factor predictions of fetches miss, averaged")
SWEPT = Counter(
    "tideover_swept_requests_total", "Requests whose pages were let go because the store says they are over"
)
KV_TRAFFIC = Gauge(
    "tideover_kv_traffic_bytes_per_second", "KV to and from store and peers, over a minute", ["place", "direction"]
)
KV_NIC_SHARE = Gauge(
    "tideover_kv_nic_share", "KV traffic over the interface's bandwidth; absent if unknown", ["place", "direction"]
)
MONEY_PER_HOUR = Gauge(
    "tideover_money_per_hour", "Of KV to store and peers over a minute, and of the instance, where priced", ["what"]
)
PEER_STREAMS = Counter(
    "tideover_peer_streams_total", "Page streams to other nodes by end (served, busy, refused, broken)", ["end"]
)
PEER_BYTES = Counter("tideover_peer_bytes_total", "Bytes of pages to and from other nodes", ["direction"])
PEER_FAILURES = Counter(
    "tideover_peer_failures_total", "Page streams from other nodes that failed, by reason", ["reason"]
)
GUEST_PAGES = Counter(
    "tideover_guest_pages_total",
    "Pages copied here ahead of a cut-over (taken), and what became of them (claimed by the next owner, dismissed)",
    ["fate"],
)
GUEST_REFUSALS = Counter(
    "tideover_guest_refusals_total",
    "Requests whose pages were not taken ahead, by reason (full, layout, not_owner)",
    ["reason"],
)
PREPARE_SECONDS = Histogram(
    "tideover_prepare_seconds",
    "One turn of copying pages to a next owner's node, as its source sees it",
    buckets=LATENCY_BUCKETS,
)
