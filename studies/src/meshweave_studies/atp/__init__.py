"""ATP (Cheng et al.): figures 10 to 12, table 3, and the choices of its equations."""
