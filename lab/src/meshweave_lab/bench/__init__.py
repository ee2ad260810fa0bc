"""Benchmarks of 2D products in a lab: every algorithm and PyTorch's DTensor on the same operands.

`rivals` chooses who takes part, `rounds` runs them, `results` holds their times, `shapes` compares mesh shapes.
`rank` is what each rank runs; nothing is imported here, so that ranks start fast.
"""
