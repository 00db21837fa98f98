"""What `python -m fast` is made of: checking its options, measuring, comparing op by op, showing."""
