"""Runs the calls of clients, in this process or on Ray actors, and repeats what fails."""
