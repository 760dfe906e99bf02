"""Builds of the grouped GEMMs, right and deliberately wrong."""
