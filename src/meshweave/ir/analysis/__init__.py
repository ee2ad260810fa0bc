"""What is derived from a program: edges, matches, races, labels, lifetimes; and the proof that it is sound."""
