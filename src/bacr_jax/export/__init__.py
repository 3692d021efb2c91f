"""Policies for transformers: folders that say by themselves how they are asked."""
