"""What must survive: tokens, KV pages and leases. One daemon per node, Redis behind it."""
