"""T3 (ASPLOS '24): sliced sub-layers on GPUs simulated down to their memory controllers."""
