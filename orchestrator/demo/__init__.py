"""The whole story on one machine: a batch of real prompts, two machines lost on the way, the same bytes."""
