"""Data sets that are made from fonts and images of installed packages, without a download."""
