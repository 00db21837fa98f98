"""The contract: config, metadata, closed-form integers, checks of arguments."""
