"""The worker's metrics; vLLM's names where they mean the same."""

from __future__ import annotations

from context_daemon.observability import Counter, Gauge, Histogram

RUNNING = Gauge("vllm:num_requests_running", "Sequences in the engine's batch")
WAITING = Gauge("vllm:num_requests_waiting", "Sequences that wait for room in the batch")
KV_USAGE = Gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1")
PREEMPTIONS = Counter("vllm:num_preemptions", "Sequences whose pages were taken back")
PROMPT_TOKENS = Counter("vllm:prompt_tokens", "Prefill tokens computed")
GENERATION_TOKENS = Counter("vllm:generation_tokens", "Tokens sampled")
STEP_SECONDS = Histogram("tideover_step_seconds", "Duration of one engine iteration")
COMMIT_LATENCY = Histogram("tideover_worker_commit_seconds", "Commit message sent to acknowledged", ["kind"])
COMMIT_STATUS = Counter("tideover_worker_commits", "Commit results by status", ["status"])
KV_BYTES = Counter("tideover_worker_kv_bytes_written", "KV bytes acknowledged by the KV store")
KV_FAILURES = Counter("tideover_kv_write_failures", "KV writes that failed and are due again")
STORE_AWAY = Gauge("tideover_store_away", "1 while the durable store does not answer")
BACK_PRESSURE = Counter("tideover_back_pressure_seconds", "Time the step loop waited for commits")
RECOMPUTED = Counter("tideover_recomputed_tokens", "Positions computed again after an interruption")
HANDED_OVER = Counter("tideover_worker_handovers", "Leases moved away in a drain", ["to"])
