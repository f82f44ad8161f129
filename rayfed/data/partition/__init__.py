"""Which client has which samples."""
