"""Distribution of samples among clients."""
