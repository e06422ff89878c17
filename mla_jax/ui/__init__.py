"""Console, chat, batch files, help and doctor of the command line."""
