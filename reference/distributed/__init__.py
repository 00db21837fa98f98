"""Exchange of tensors between context-parallel ranks, which divide the tokens of every sequence among themselves."""
