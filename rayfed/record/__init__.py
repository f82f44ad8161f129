"""The files of a run folder: writing them, reading them back, and continuing a run from them."""
