"""The main loops of the decode: one for row blocks of 16 and 32, one for row blocks of 64."""
