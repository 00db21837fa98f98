"""Tests of the exchange of states and context between ranks."""
