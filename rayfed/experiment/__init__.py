"""One experiment as a user asks for it: from a checked config to a folder with tables and pictures."""
