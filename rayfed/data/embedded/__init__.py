"""Data made from what installed packages carry: no download, the same images everywhere."""
