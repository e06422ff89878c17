"""What is computed: arrays in, arrays out."""
