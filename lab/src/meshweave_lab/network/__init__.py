"""The network of a lab: namespaces, cables and routes planned, built, probed and removed."""
