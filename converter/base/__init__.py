"""Errors, text, JSON, child processes and atomic file writes. Nothing here depends on models."""
