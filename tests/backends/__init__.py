"""Choice of backends."""
