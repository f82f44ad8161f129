"""The executors that a config can name, one in each file."""
