"""Fidelity runs: how far estimates and simulations are off from what a lab measures.

`cases` draws random products, `measure` runs and predicts them. `rank` is what each rank runs; nothing is imported
here, so that ranks start fast.
"""
