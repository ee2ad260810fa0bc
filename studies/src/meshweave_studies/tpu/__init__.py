"""Programs compiled for TPUs that need not be there, and the schedules that their compiler made of them."""
