"""Checks that a machine can run the library: every code path is tried on a small model."""
