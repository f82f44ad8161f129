"""The same work in RayFed, plain PyTorch, Flower, pfl and BlazeFL: `python -m benchmarks.rivals`."""
