"""The main loops of the decode: one for row blocks of 16 and 32 rows, one for row blocks of 64 rows."""
