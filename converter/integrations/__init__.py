"""Integrations of edge-opt into other pipelines."""
