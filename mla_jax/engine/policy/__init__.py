"""Cache policies: the pages that a request needs, and those that its row reads."""
