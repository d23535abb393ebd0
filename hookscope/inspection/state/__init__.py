"""Leave a network as it was: remember its state, and put it back."""
