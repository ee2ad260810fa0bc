"""Proof that a parallelised model computes what its original does.

given       inputs of a proof, and how outputs and losses are got of a module
state       modules as a proof runs them: in double precision, without dropout, restored afterwards
runs        what one run of a model gives: values, gradients, the narrowest dtype
rounding    the errors that rounding explains, measured on the original
shards      what a rank has of a tensor
differences how much tensors of a model and its original differ, and the first that all ranks find to differ
causes      the likely cause of a difference, by testing what would explain its numbers
trail       what enters and leaves the modules of a model, to find the first that differs
proof       `prove`
reduced     copies of a model with fewer layers and words, shorter windows and random weights
check       what `parallelize` proves before it replaces anything
"""
