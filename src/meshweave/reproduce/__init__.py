"""Published results of papers beside ours: tables with verdicts, and the papers' figures computed again."""
