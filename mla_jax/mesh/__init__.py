"""Meshes of several devices: parts of parameters, collectives, and their costs."""
