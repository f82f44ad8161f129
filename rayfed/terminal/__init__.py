"""What a command shows while it works, and how it ends."""
