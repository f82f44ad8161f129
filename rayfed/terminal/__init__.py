"""Command lines, progress output, exit codes and signals of all commands."""
