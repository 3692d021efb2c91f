"""Loads or generates questions with verifiable answers, and groups, splits and samples them."""
