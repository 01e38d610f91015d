"""The algorithms, one file each, and the layers and heads they share."""
