"""Sampling of trunks and branches."""
