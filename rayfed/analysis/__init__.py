"""Analysis of finished runs: features of domains and the loss around the models."""
