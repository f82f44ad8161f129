"""Readers of data sets, one in each file; `data.reader` is the name of the file."""
