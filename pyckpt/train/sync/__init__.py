"""What ranks tell each other, and what reaches one rank and is meant for all of them."""
