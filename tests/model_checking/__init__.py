"""Explicit-state checking of the transfer and migration protocols over a network that misbehaves."""
