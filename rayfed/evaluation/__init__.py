"""Test sets of an evaluation, and all statistics over clients and domains in the rows of rounds."""
