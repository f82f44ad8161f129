"""One file per public layout of image data; found by file name."""
