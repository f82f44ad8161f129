"""Several hosts on one machine, and what a run on them does: `make test-cluster`, which needs root."""
