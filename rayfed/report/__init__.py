"""What a run leaves and shows: files, tables, figures, lines on the screen."""
