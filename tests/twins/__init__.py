"""The two packages compared: structure, signatures, results, registered ops."""
