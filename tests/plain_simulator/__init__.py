"""The simulator in plain Python, slow and plain to read: the oracle that the fast one agrees with."""
