"""What people look at: tables and timelines."""
