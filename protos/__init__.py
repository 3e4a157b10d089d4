"""The wire: generated from the .proto files beside this one; regenerate with `make protos`."""
