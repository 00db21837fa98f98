"""Exchange between ranks."""
