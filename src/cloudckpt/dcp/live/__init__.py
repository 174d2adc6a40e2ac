"""Live objects as entries of a state dict: models, optimizers, schedulers, loaders; what a load leaves unfilled."""
