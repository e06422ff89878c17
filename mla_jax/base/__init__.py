"""The definitions that all other packages share: configs, options, errors, number formats, costs."""
