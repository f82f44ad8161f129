"""Checks a downloaded data set against what was published, and decodes it into the cache."""
