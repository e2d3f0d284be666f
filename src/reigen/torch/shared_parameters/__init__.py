"""Parameters and optimizer state that exist once a host, for DistributedOptimizer(share_parameters=True)."""
