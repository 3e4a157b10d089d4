"""Where a request runs next: placement and recovery (pure), and the router that carries it out."""
