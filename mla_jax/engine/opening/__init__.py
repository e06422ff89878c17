"""Opening a model: from its headers and the options to a plan."""
