"""Measured products, attentions and collectives beside what the constants of the catalog say."""
