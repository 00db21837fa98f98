"""Exchange between context-parallel ranks; knows no attention family."""
