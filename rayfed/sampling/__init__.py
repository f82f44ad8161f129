"""Rules that draw the clients of a round, one in each file."""
