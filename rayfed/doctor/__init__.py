"""Whether an experiment fits on this machine, and how long it may take."""
