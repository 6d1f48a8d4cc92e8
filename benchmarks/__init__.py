"""Measurements of the product: arms as data, real servers, a table and one JSON line."""
