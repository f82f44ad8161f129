"""Simulated differences between clients: capacity, availability, dropout, speed and bandwidth."""
