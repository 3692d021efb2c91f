"""Checks that a machine can run the library by exercising every code path on a small model."""
