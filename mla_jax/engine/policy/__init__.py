"""Cache policies: which pages a request needs, and what a row reads of them."""
