"""The laboratory: a small target of our own, on which the whole table of training arms runs in an hour."""
