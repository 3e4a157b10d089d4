"""The machines: Ray cluster, worker replacement, the local cluster."""
