"""What several devices of a mesh share: parts of parameters, messages and what they cost."""
