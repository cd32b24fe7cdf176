"""Explicit-state checking of the transfer and migration protocols."""
