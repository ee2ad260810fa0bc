"""Machines: chips, links, networks and the cluster that they form."""
