"""Exchange of tensors and attention states between context-parallel ranks, for any attention family."""
