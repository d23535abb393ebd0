"""Turn what a network returned into the one number to differentiate."""
