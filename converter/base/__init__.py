"""Errors, text, JSON, HTML, child processes and atomic file writes. Nothing here depends on models."""
