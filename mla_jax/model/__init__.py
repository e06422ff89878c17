"""The model's arithmetic: arrays in, arrays out."""
