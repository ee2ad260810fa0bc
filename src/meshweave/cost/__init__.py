"""The cost model: what ops, products, calls and collectives take on a machine."""
