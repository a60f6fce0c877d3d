"""Executors: what runs a schedule."""
