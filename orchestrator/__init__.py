"""What decides: jobs, routing, recovery and the fleet. One per cluster, stateless over the durable store."""
