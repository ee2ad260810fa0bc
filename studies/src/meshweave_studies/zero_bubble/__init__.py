"""Zero Bubble (arXiv 2401.10241): throughput and memory of its table 4, by simulation of our schedules."""
