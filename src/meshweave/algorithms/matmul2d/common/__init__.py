"""What 2D products share: the problem, slices, ring steps and their costs."""
