"""What computes: the engine, its commits, the notices and the drain. One actor per accelerator group."""
