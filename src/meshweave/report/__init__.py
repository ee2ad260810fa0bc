"""Pages, charts and timelines drawn from results."""
