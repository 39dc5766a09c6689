"""Weights in buckets, from a trainer to engines on the same host."""
