"""Where calls run: in this process or on Ray actors."""
