"""Processes that are ranks: starting them, knowing that they live, agreeing, clocks and signals."""
