"""A program as columns of integers: what the C++ core reads."""
