"""What is special for speed: groups of clients that share their passes, and graphs of operations."""
