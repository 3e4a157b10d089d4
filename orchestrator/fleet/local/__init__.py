"""The local cloud: a supervisor that runs a whole cluster on loopback, machine by machine."""
