"""Strategies of a layer on every mesh of a machine, ranked, as ATP does it (Cheng et al., 2023) for its own."""
