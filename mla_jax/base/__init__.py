"""What all agree on."""
