"""The vocabulary of a method: server and client halves, the cohort of a round, their messages."""
