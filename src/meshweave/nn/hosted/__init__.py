"""Models of transformers that run by their own code, whose products are programs of a strategy."""
