"""`sglang-dflow bench`: measurements of served speculation, and the report on them."""
