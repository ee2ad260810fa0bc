"""Errors, units and progress reports that every layer uses."""
