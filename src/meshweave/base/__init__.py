"""What every layer uses: errors and units."""
