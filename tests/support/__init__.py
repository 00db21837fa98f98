"""What several tests share: inputs, oracles, ranks, processes."""
