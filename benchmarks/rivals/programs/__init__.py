"""One program for each side, as a user of it would write it; what is there for the measurement is marked."""
