"""How a node learns that it will be taken away."""
