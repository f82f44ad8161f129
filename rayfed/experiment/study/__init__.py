"""Several experiments as one table: their coordinates, folder and runs, and what is read from them."""
