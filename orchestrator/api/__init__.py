"""gRPC and HTTP front doors."""
