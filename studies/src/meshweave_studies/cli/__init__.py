"""The verbs `reproduce`, `compile`, `simulate-gpu` and `tune mesh` of the command line."""
