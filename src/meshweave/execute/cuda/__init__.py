"""Track and trigger on NVIDIA GPUs: a product that counts its tiles, and copies that wait for the count."""
