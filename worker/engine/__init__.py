"""Where the model runs: scheduler, pages, sampler and the torch modules. Knows nothing of Ray, Redis or gRPC."""
