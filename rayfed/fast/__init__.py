"""Does the same in fewer operations: groups, graphs, kernels."""
